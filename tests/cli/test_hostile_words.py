"""Nonsense and harm on the command line: one sentence, a code, no traceback; and what a job leaves is its user's."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from holdfast.agent.worker_logs import WorkerLogs
from holdfast.cli.main import main
from holdfast.cli.master import open_journal
from holdfast.cli.run import _new_job_id, fault_table
from holdfast.cli.run_flag_values import job_name
from holdfast.cli.run_flags import parse_run
from holdfast.core.records import JobCreated, TermBegan
from holdfast.core.settings import Settings
from holdfast.errors import UsageError
from holdfast.journal.sqlite import SqliteJournal, read_entries
from holdfast.observe.token_file import find_or_create_token
from holdfast.wire.tls import Tls
from support.processes import environment
from support.worker_groups import agent_config

HUGE = "9" * 30
REFUSED: dict[str, str] = {
    f"run --max-restarts {HUGE} a.py": "give a whole number, 0 to",
    f"run --nnodes {HUGE} a.py": "at most",
    f"run --nproc-per-node {HUGE} a.py": "at most",
    f"run --snapshots {HUGE} a.py": "give auto, off",
    "run --silence-timeout 1e300 a.py": "give a time in seconds",
    "run --silence-timeout nan a.py": "give a time in seconds",
    "run --heartbeat-interval 1e-9 a.py": "0.01 or more",
    "run --straggler-interval 1e-9 a.py": "0.01 or more",
    "run --hang-timeout 1e-9 a.py": "0.1 seconds or more",
    f"run --spares {2**31 - 1} a.py": "0 to 65536",
    "run --local-addr a..b a.py": "give a host",
    "run --local-addr /etc a.py": "give a host name or an address",
    "run --rdzv-backend c10d --rdzv-endpoint a..b:29400 a.py": "give a host",
    f"run --rdzv-backend c10d --rdzv-endpoint {'a' * 64}:29400 a.py": "give a host",
    "run --nnodes 2 --master-addr a..b a.py": "give a host",
    "status --endpoint a..b:29400": "give a host",
    "run -m ../a": "no module named ../a",
    "run --master-port 99999 a.py": "65535",
    "run --rdzv-endpoint a:99999 a.py": "65535",
    "run --rdzv-id a#b a.py": "give at most 128 letters",
    "run --rdzv-id a?b a.py": "give at most 128 letters",
    "run --rdzv-id a%b a.py": "give at most 128 letters",
    "run --rdzv-id .. a.py": "give at most 128 letters",
    "run --rdzv-id ../a a.py": "give at most 128 letters",
    "run --rdzv-id /etc a.py": "give at most 128 letters",
    "run --rdzv-id a\x1fb a.py": "give at most 128 letters",
    "master --port 99999 --job-id a": "65535",
    "master --heartbeat-interval 0.001 --job-id a": "0.01 or more",
    "master --silence-timeout nan --job-id a": "give a time",
    "master --job-id ../a": "give at most 128 letters",
    "master --job-id a --host a..b": "give a host",
    "master --job-id a --state-dir ~nouser-of-that-name": "no home directory",
    f"master --nnodes {HUGE} --job-id a": "at most",
    "status --endpoint a:99999": "65535",
    "status --state-dir ~nouser-of-that-name": "no home directory",
    "checkpoints ls ~nouser-of-that-name": "no home directory",
    "checkpoints ls zip::/": "no store is known for zip::/",
    "checkpoints ls /nonexistent": "there is no directory /nonexistent",
    "checkpoints ls {file}": "there is no directory",
    "checkpoints prune --keep last:1 --grace nan {empty}": "give a time in seconds",
    "checkpoints prune --keep last:1 --grace 1e300 {empty}": "give a time in seconds",
    f"checkpoints rm {{empty}} {HUGE}": "no checkpoint of step",
    f"checkpoints show {{empty}} {'9' * 5000}": "not a step",
    f"logs --tail {HUGE}": f"--tail {HUGE}: give at most 2147483647; holdfast logs --help",
    f"events --after {HUGE}": f"--after {HUGE}: give at most 2147483647",
    f"resize {HUGE}": f"NODES {HUGE}: give at most",
    "run --recovery=-- a.py": "-- is no value",
    "master --job-id a --recovery=--": "-- is no value",
    "run --tls-ca {file} a.py": "alone encrypts nothing",
    "master --job-id a --tls-key {file}": "needs a certificate and its key",
    f"run --tee {'9' * 5000}:1 a.py": "give local ranks",
    f"run {'a' * 5000}": "File name too long",
    f"status {'a' * 5000}.sqlite": "File name too long",
    f"checkpoints ls {'a' * 5000}": "File name too long",
    "checkpoints ls file://[a": "is not a URL",
    "checkpoints ls file:///a%00b": "it has a zero byte",
    "run --checkpoint-dir file:///a%00b {file}": "it has a zero byte",
    "run --checkpoint-dir file://[a {file}": "is not a URL",
    "plan 1e18 --step 1e-300": "cannot be",
    "status \udcff": "is not UTF-8 text",
    "run --fault-table {deep} {file}": "is no TOML",
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(words[:50]))
def test_nonsense_is_refused_in_a_sentence(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "2000")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "deep").write_text("a = " + "[" * 100_000)
    sentence = REFUSED[words]
    for name in ("empty", "file", "deep"):
        words = words.replace(f"{{{name}}}", str(tmp_path / name))
    with pytest.raises(SystemExit) as refused:
        main(words.split(" "))
    assert refused.value.code not in (0, None)
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_names_of_jobs() -> None:
    for name in ("job1", "team/run-3", "größe 2", "a.b:c@d+e=f,g~h", "none", ""):
        assert job_name(name) == name
    for name in ("a\nb", "\ud800", "x" * 129, "ü" * 65, "-x", ".x", "a\u202eb"):
        with pytest.raises(ArgumentTypeError):
            job_name(name)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (bytes(range(256)), "it is not text"),
        (b"0123456789\x00abcdefghij", "cannot be printed"),
        (b"a" * 64, "easily guessed"),
        (b"0123456789abcdef" * 1_000, "more than 4096 bytes"),
    ],
)
def test_a_file_that_is_no_token(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=sentence):
        find_or_create_token({}, str(path), str(tmp_path), loopback=True)


def test_an_endless_file_is_no_token() -> None:
    with pytest.raises(UsageError):
        find_or_create_token({}, "/dev/zero", "/nonexistent", loopback=True)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"]
)
def test_a_file_that_is_no_certificate(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pem"
    path.write_bytes(content)
    files = Tls(str(path), str(path), str(path))
    for use in (files.server_context, lambda: files.client_context(check_hostname=True)):
        with pytest.raises(UsageError):
            use()


def test_what_a_job_leaves_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        state = tmp_path / "state"
        SqliteJournal(state / "jobs" / "a" / "journal.sqlite").close()
        old = state / "jobs" / "b"
        old.mkdir(mode=0o755)
        SqliteJournal(old / "journal.sqlite").close()
        config = agent_config(tmp_path)
        files = WorkerLogs(config.logs).open(1, 0, 0)
    finally:
        os.umask(before)
    logs = Path(files.stdout_path) if files.stdout_path else None
    closed = [state, state / "jobs", state / "jobs" / "a", old]
    if logs is not None:
        for descriptor in (files.stdout_fd, files.stderr_fd):
            assert descriptor is not None
            os.close(descriptor)
        closed += [config.logs.run_dir]
        assert logs.stat().st_mode & 0o077 == 0
    for path in closed:
        assert path.stat().st_mode & 0o077 == 0, path
    assert (old / "journal.sqlite").stat().st_mode & 0o077 == 0


def test_a_journal_under_an_odd_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a#b?c%20d" / "journal.sqlite"
    SqliteJournal(path).close()
    assert read_entries(path) == []


READ = """
import sys
from pathlib import Path
from holdfast.journal.sqlite import read_entries
print(read_entries(Path(sys.argv[1]) / "journal.sqlite"))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_status_works_on_a_file_system_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    SqliteJournal(path).close()
    script = f'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec {sys.executable} -c "$2" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), READ]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize("words", ["status --nonsense", "nonsense", "logs --tail x", "status -o xml", "checkpoints rm"])
def test_a_mistake_that_typer_finds_is_one_sentence_too(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words.split())
    said = capsys.readouterr().err
    assert refused.value.code == 2
    assert said.startswith("holdfast: ") and said.count("\n") == 1 and "--help says what there is" in said


@pytest.mark.parametrize("word", ["\n", "a\x1b[31mb", "\udcff", "9" * 5_000], ids=["line", "escape", "half", "long"])
def test_what_is_wrong_is_said_on_one_short_line_whatever_was_given(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["run", "--nnodes", word, "a.py"],
        ["run", "--nproc-per-node", word, "a.py"],
        ["run", f"--{word}", "a.py"],
        ["run", "--rdzv-endpoint", f"{word}:x", "a.py"],
        ["run", "--recovery", word, "a.py"],
        ["status", f"--{word}"],
    ):
        with pytest.raises(SystemExit) as refused:
            main(words)
        said = capsys.readouterr().err
        assert refused.value.code == 2, words
        assert said.startswith("holdfast: ") and said.count("\n") == 1 and "\x1b" not in said, words
        assert len(said) < 8_000, words


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_file_that_does_not_end_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    named = str(path if kind == "a pipe" else "/dev/zero")
    files = Tls(named, named, named)
    with pytest.raises(UsageError, match="not a regular file"):
        files.server_context()
    with pytest.raises(UsageError, match="not a regular file"):
        find_or_create_token({}, named, str(tmp_path), loopback=True)
    with pytest.raises(UsageError, match="not a regular file"):
        fault_table(parse_run(["--fault-table", named, "a.py"], {}))


def test_two_names_of_one_directory_are_two_jobs(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "a/b", Settings(), resume=False)
    list(journal.replay())
    journal.append([JobCreated(at=1.0, job_id="a/b", settings=Settings()), TermBegan(at=1.0, term=1)])
    journal.close()
    with pytest.raises(UsageError, match="the unfinished job a/b has its journal where that of a_b would be"):
        open_journal(tmp_path, "a_b", Settings(), resume=False)
    open_journal(tmp_path, "a/b", Settings(), resume=False).close()


@pytest.mark.parametrize(
    "words",
    [["--role=\udcff", "a.py"], ["--failure-domain=\udcff", "a.py"], ["\udcff.py"], ["a.py", "\udcff"]],
    ids=["role", "domain", "script", "argument"],
)
def test_bytes_that_are_no_text_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        parse_run(words, {})


@pytest.mark.parametrize("script", ["a#b%.py", "-x.py", "a\nb.py", ".py", "é" * 90 + ".py", "x" * 200, "train.v2.py"])
def test_the_job_of_any_script_has_a_valid_name(script: str) -> None:
    assert job_name(_new_job_id(script))
    assert _new_job_id("train.v2.py").startswith("train.v2-")
