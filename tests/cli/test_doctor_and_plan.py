"""`holdfast doctor --device` tries out this machine's devices; `holdfast plan` computes what protection costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import main
from support.plug_ins import install_late_device


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "holdfast", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=env)


def test_the_doctor_finds_this_machine_well() -> None:
    done = run("doctor", "--device", "--accelerator", "cpu", "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert {"processor", "matmul", "bandwidth", "disk", "events", "random numbers", "communicator"} <= set(found)
    assert all(row["is_well"] is not False for row in found.values())
    assert "GiB free" in found["host memory"]["text"] and "--host-copy" in found["copy to the host"]["text"]


def test_the_doctor_names_what_is_wrong(tmp_path: Path) -> None:
    """Its multiplication is wrong, and its events never come: the others are tried all the same."""
    env = install_late_device(tmp_path)
    broken = "\n\n    def tensor(self, index, size_bytes):\n        raise RuntimeError('CUDA error: unknown error')\n"
    plug_in = tmp_path / "site" / "holdfast_late.py"
    text = plug_in.read_text()
    plug_in.write_text(text.replace("        return Event()\n", "        return Event()\n" + broken, 1))
    done = run("doctor", "--device", **env)
    assert done.returncode == 8, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("events")]
    assert "FAILED" in line and "unknown error" in line
    assert "communicator" in done.stdout and "host memory" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["doctor"], "say what to test"),
        (["plan", "0"], "BYTES 0 cannot be"),
        (["plan", "1e9", "--shards", "9"], "--shards at most the number of ranks"),
        (["plan", "1e9", "--step", "nan"], "--step nan cannot be"),
    ],
)
def test_nonsense_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_a_plan_shows_the_default_beside_copies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "96.4e9", "--step", "2"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "--replicas 1" in printed and "not measured" in printed
    with pytest.raises(SystemExit):
        main(["plan", "96.4e9", "-o", "json"])
    assert [found["copies"] for found in json.loads(capsys.readouterr().out)["plans"]] == [0, 1]
