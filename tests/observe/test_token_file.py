"""Where a job's token comes from, for those who start the job and for those who watch it."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.errors import UsageError
from holdfast.observe.token_file import Token, find_or_create_token, find_token

SECRET = "0123456789abcdef0123456789abcdef"


def test_the_variable_comes_before_the_file_and_the_file_before_the_state_directory(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from-a-file\n")
    (tmp_path / "token").write_text("from-the-state-directory\n")
    assert find_token({"HOLDFAST_TOKEN": "said"}, file, tmp_path).secret == "said"
    assert find_token({"HOLDFAST_TOKEN": " "}, file, tmp_path) == Token("from-a-file", f"the file {file}")
    assert find_token({}, None, tmp_path).secret == "from-the-state-directory"


def test_without_a_token_the_sentence_says_how_to_give_one_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="HOLDFAST_TOKEN, or name its file with --token-file"):
        find_token({}, None, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"", "is empty"), (b"\xff\xfe\xff", "not text")])
def test_a_token_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=why) as of_watcher:
        find_token({}, file, tmp_path)
    with pytest.raises(UsageError, match=why) as of_job:
        find_or_create_token({}, str(file), str(tmp_path), loopback=True)
    assert str(of_watcher.value) == str(of_job.value)


def test_a_binary_token_file_gets_the_same_sentence_from_run_and_from_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    file = tmp_path / "secret"
    file.write_bytes(b"\xff\xfe\xff")
    flags = ["--state-dir", str(tmp_path), "--token-file", str(file)]
    (tmp_path / "train.py").touch()
    sentences = []
    for command in (
        ["run", "--standalone", "--start-method", "spawn", *flags, str(tmp_path / "train.py")],
        ["status", "--endpoint", "127.0.0.1:1", *flags],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        sentences.append([line for line in capsys.readouterr().err.splitlines() if "it is not text" in line])
    assert sentences == [[f"holdfast: cannot read the token file {file}: it is not text"]] * 2


def test_a_job_on_loopback_creates_a_token_once_that_only_its_user_can_read(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    first = find_or_create_token({}, None, str(state_dir), loopback=True)
    assert find_or_create_token({}, None, str(state_dir), loopback=True) == first
    assert find_token({}, None, state_dir).secret == first
    assert stat.S_IMODE((state_dir / "token").stat().st_mode) == 0o600
    assert [path.name for path in state_dir.iterdir()] == ["token"], "no draft is left behind"


def test_a_job_beyond_loopback_must_be_given_a_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not loopback, so the job needs a token") as refused:
        find_or_create_token({}, None, str(tmp_path), loopback=False)
    make, use = [line.strip() for line in str(refused.value).splitlines() if line.startswith("  ")]
    subprocess.run(["bash", "-c", make.replace("python", sys.executable)], env={"HOME": str(tmp_path)}, check=True)
    assert stat.S_IMODE((tmp_path / "holdfast-token").stat().st_mode) == 0o600
    assert use == "HOLDFAST_TOKEN_FILE=~/holdfast-token holdfast run …"
    made = str(tmp_path / "holdfast-token")
    assert find_or_create_token({}, made, str(tmp_path), loopback=False) == Path(made).read_text().strip()
    assert find_or_create_token({"HOLDFAST_TOKEN": SECRET}, None, str(tmp_path), loopback=False) == SECRET


def test_the_two_commands_that_make_and_use_a_token_are_printed_on_lines_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    (tmp_path / "train.py").touch()
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.1:29400"]
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags, "--state-dir", str(tmp_path), str(tmp_path / "train.py")])
    assert ended.value.code == 2
    sentence, make, use = capsys.readouterr().err.splitlines()
    assert sentence.startswith("holdfast: the master's address is not loopback") and sentence.endswith("itself):")
    assert (
        make.startswith("  (umask 077; python -c ") and use == "  HOLDFAST_TOKEN_FILE=~/holdfast-token holdfast run …"
    )


def test_a_job_is_not_started_with_a_short_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the variable HOLDFAST_TOKEN holds 5 characters"):
        find_or_create_token({"HOLDFAST_TOKEN": "short"}, None, str(tmp_path), loopback=True)


def test_a_token_file_that_others_can_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o644)
    assert find_or_create_token({}, str(file), str(tmp_path), loopback=False) == SECRET
    assert [getattr(record, "holdfast_event", "") for record in caplog.records] == ["token-file-readable"]
