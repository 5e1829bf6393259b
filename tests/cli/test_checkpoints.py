"""`holdfast checkpoints` as people and programs use it: directories, fsspec, real files, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import build_app
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.storage.manifest import finite
from holdfast.storage.stores import open_store
from support.processes import environment, started, wait_for_line
from support.saves import flip, save, saved, visible


def ran(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(build_app(), ["checkpoints", *map(str, arguments)])
    if isinstance(result.exception, HoldfastError):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def printed(*arguments: object) -> str:
    code, out, err = ran(*arguments)
    assert code == 0, err
    return out


def answered(*arguments: object) -> Any:
    return json.loads(ran(*arguments, "-o", "json")[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    saved(tmp_path, [1, 2, 3])
    return tmp_path


def test_ls_shows_all_there_is(root: Path) -> None:
    store = open_store(str(root))
    save(store, 4, metrics=finite({"loss": 0.125, "odd": float("inf")}), view=7)
    (root / "step-2" / "part-0.safetensors").unlink()
    (root / ".step-9.a.partial").mkdir()
    (root / ".step-9.a.partial" / "part-0.safetensors").write_bytes(b"123")
    text = printed("ls", root)
    assert "loss 0.125, odd ?" in text
    assert "step 2 is DAMAGED" in text
    assert "step 9 is unfinished: 3 B" in text
    answer = answered("ls", root)
    assert [row["step"] for row in answer["checkpoints"]] == [4, 3, 1]
    assert answer["checkpoints"][0]["metrics"] == {"loss": 0.125, "odd": None}
    assert answer["checkpoints"][0]["view"] == 7
    assert [row["step"] for row in answer["damaged"]] == [2]
    assert [row["step"] for row in answer["unfinished"]] == [9]


def test_ls_of_nothing(tmp_path: Path) -> None:
    assert printed("ls", tmp_path).strip() == "no checkpoints"
    assert answered("ls", tmp_path) == {"checkpoints": [], "damaged": [], "unfinished": []}


def test_show_shows_the_manifest_of_the_latest_or_of_a_step(root: Path) -> None:
    assert "step-3" in printed("show", root)
    text = printed("show", root, 1)
    assert "2 ranks: 2 shards × 1 shares" in text
    assert "part-1.safetensors" in text
    assert answered("show", root, 2)["manifest"]["about"]["step"] == 2
    with pytest.raises(CheckpointError, match="no checkpoint of step 77"):
        ran("show", root, 77)
    with pytest.raises(UsageError, match="is not a step"):
        ran("show", root, "newest")


def test_verify_reads_everything_and_ends_with_one_on_damage(root: Path) -> None:
    assert printed("verify", root).count("sound") == 3
    flip(root / "step-2" / "part-1.safetensors")
    (root / "step-1" / "manifest.json").unlink()
    flip(root / "step-3" / ".metadata", 9)
    code, out, _ = ran("verify", root)
    assert code == 1
    assert out.count("DAMAGED") == 3
    assert "part-1.safetensors has a wrong checksum in block 0" in out
    assert "stock readers only" in out
    answer = answered("verify", root, 2)
    assert not answer["sound"]
    assert answer["checkpoints"][0]["damage"]
    assert ran("verify", root, 2)[0] == 1
    with pytest.raises(CheckpointError, match="there is no directory"):
        ran("verify", root / "nothing")


def test_prune_says_what_it_would_do_and_does_it(root: Path) -> None:
    printed("pin", root, 1, "--tag", "baseline")
    assert "would remove step 2" in printed("prune", root, "--keep", "last:1", "--dry-run")
    assert visible(root) == {"step-1", "step-2", "step-3"}
    text = printed("prune", root, "--keep", "last:1")
    assert "removed step 2" in text
    assert "kept step 1: pinned as baseline" in text
    assert visible(root) == {"step-1", "step-3"}
    answer = answered("prune", root, "--keep", "last:1")
    assert answer["removed"] == []
    assert set(answer["kept"]) == {"1", "3"}
    printed("pin", root, 1, "--tag", "baseline", "--remove")
    assert answered("prune", root, "--keep", "last:1")["removed"] == [1]
    with pytest.raises(UsageError, match="not a policy"):
        ran("prune", root, "--keep", "some")


def test_rm_removes_what_it_may(root: Path) -> None:
    printed("pin", root, "latest")
    code, out, err = ran("rm", root, 1, 3, 99)
    assert code == 1
    assert "removed step 1" in out
    assert "pinned as keep" in err
    assert "no checkpoint of step 99" in err
    assert visible(root) == {"step-2", "step-3"}
    with started("read.py", root, 3) as reader:
        wait_for_line(reader, "reading")
        code, _, err = ran("rm", root, 3, "--force")
        assert code == 1
        assert "is being read" in err
    printed("rm", root, 3, 2, "--force")
    assert visible(root) == set()


def test_a_store_of_fsspec_is_as_good_as_a_directory(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/run"
    save(open_store(url), 8)
    assert [row["step"] for row in answered("ls", url)["checkpoints"]] == [8]
    assert printed("verify", url).count("sound") == 1


def test_everything_but_export_works_without_torch(root: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from holdfast.cli.main import main; main(sys.argv[1:])"
    for words in (("ls",), ("show",), ("verify",), ("pin", "1"), ("prune", "--keep", "last:1"), ("rm", "3", "--force")):
        command = [sys.executable, "-c", code, "checkpoints", words[0], str(root), *words[1:]]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_export_runs_in_a_process_with_torch_and_its_sentences_arrive(root: Path, tmp_path: Path) -> None:
    from state.test_export import saved as saved_state
    from state.test_export import tracked

    saved_state(tmp_path / "run", tracked())
    target = tmp_path / "model.safetensors"
    environment_path = environment()["PYTHONPATH"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment_path)
        text = printed("export", tmp_path / "run", target, "--model-only", "--dtype", "bfloat16")
        assert "step 5" in text
        assert target.stat().st_size > 0
        with pytest.raises(UsageError, match="--force"):
            ran("export", tmp_path / "run", target)
