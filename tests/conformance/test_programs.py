"""Programs that launch jobs get the same results, exceptions and output from Holdfast as from torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs import agent_environment
from support.launches import HERE

DEADLINE_S = 360.0
PROGRAM = str(HERE / "program.py")


def program(tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    (tmp_path / "state").mkdir(exist_ok=True)
    variables = agent_environment(tmp_path / "state", {"PYTHONPATH": str(HERE.parent), "HF_HOME": str(tmp_path), **env})
    return subprocess.run(
        [sys.executable, *words],
        env=variables,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def told(ended: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], list[str]]:
    assert ended.returncode == 0, ended.stderr[-4000:]
    *printed, last = ended.stdout.splitlines()
    return json.loads(last), sorted(line for line in printed if "rank" in line)


AS_TORCH = {
    "results": [[0, 0, "r0 3 0"], [1, 1, "r1 3 0"]],
    "failure": ["fail", 1, 1, 1, "ValueError: no luck"],
    "failed_command": ["raise SystemExit(5)", [5]],
    "captured": [
        ["[a role0]:rank 0", "[a role1]:rank 1"],
        "torchelastic.worker.status.SUCCEEDED",
        {"run_id": "named", "role": "a role", "state": "SUCCEEDED", "rdzv_backend": "c10d", "raw_error": None},
    ],
}
"""What torch's own launcher was seen to do in the test below, which holds it to that."""
RESTARTED = {"restart": {"0": "once", "1": "once"}}
INTERRUPTED = {"received": [15, "Process PID got signal: 15", True]}
COMMAND = {"command": {"0": None, "1": None}}


@pytest.mark.thorough
def test_torchs_own_elastic_launch_does_what_is_expected_of_ours(tmp_path: Path) -> None:
    found, printed = told(program(tmp_path, PROGRAM, "torch.distributed.launcher.api", "spawn", *AS_TORCH))
    assert {name: found[name] for name in AS_TORCH} == AS_TORCH
    assert printed == ["[a role0]:rank 0 of a role has 3", "[a role1]:rank 1 of a role has 3"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "more"),
    [("spawn", RESTARTED | INTERRUPTED | COMMAND), ("fork", RESTARTED | INTERRUPTED | {"closure": {"0": 1, "1": 2}})],
    ids=["spawn", "fork"],
)
def test_elastic_launch_returns_raises_and_prints_what_torchs_does(
    tmp_path: Path, method: str, more: dict[str, Any]
) -> None:
    """Functions of the main module, arguments, results by rank, restarts, exceptions, signals; with `fork` closures."""
    expected = AS_TORCH | more
    found, printed = told(program(tmp_path, PROGRAM, "holdfast.torchrun", method, *expected, HOLDFAST_PRELOAD="none"))
    assert found.pop("threads") == 1
    assert found == expected
    assert {"[a role0]:rank 0 of a role has 3", "[a role1]:rank 1 of a role has 3"} <= set(printed)


def test_an_event_handler_that_torch_does_not_have_is_refused_before_anything_starts() -> None:
    from holdfast.torchrun import LaunchConfig, elastic_launch

    with pytest.raises(ValueError, match="event_log_handler 'nosuch': torch has no handler of that name"):
        elastic_launch(LaunchConfig(1, 1, 1, rdzv_backend="c10d", event_log_handler="nosuch"), print)()


ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
PLAIN = ("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1")


def test_accelerate_launch_has_holdfast_by_one_variable(tmp_path: Path) -> None:
    """And a failure is torch's exception, which accelerate shows as it shows torchrun's."""
    script = str(HERE / "accelerated.py")
    ended = program(tmp_path, *ACCELERATE, *PLAIN, script, HOLDFAST_TORCHRUN="1")
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank} of 2 [0, 1] True" for rank in (0, 1)]


@pytest.mark.thorough
def test_torchs_own_command_has_holdfast_by_one_variable(tmp_path: Path) -> None:
    """Its flags, exit code and exception; an error in the flags is a ValueError."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-t", "1")
    failed = program(tmp_path, *torchrun, str(HERE / "fails.py"), "exit", "7", HOLDFAST_TORCHRUN="1")
    assert failed.returncode == 1 and "exitcode  : 7 (pid:" in failed.stderr
    assert "holdfast" in failed.stderr and "[default1]:rank 1 is there" in failed.stdout
    main = ("-m", "holdfast.torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--nnodes", "2")
    refused = program(tmp_path, *main, str(HERE / "tells.py"))
    assert refused.returncode == 1
    assert "ValueError: --rdzv-backend c10d needs an address" in refused.stderr


@pytest.mark.thorough
def test_a_main_module_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from holdfast.torchrun import LaunchConfig, elastic_launch\n"
        "def work(): return 1\n"
        "config = LaunchConfig(1, 1, 1, rdzv_backend='c10d', rdzv_endpoint='localhost:0')\n"
        "print(elastic_launch(config, work)())\n"
    )
    ended = program(tmp_path, str(script), HOLDFAST_PRELOAD="none")
    assert ended.returncode == 1
    assert "put the launch below `if __name__ == '__main__':`" in ended.stderr
