"""What a script can notice of its process is the same under both launchers, but for what docs/torchrun.md says."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest

from support.launches import CHANCE, HERE, Launch, both, documented, start

HEADING = "What a script can notice"
MODULES = "modules that are imported already"
NOTICED = {
    "modules of torch": MODULES,
    "modules of numpy": MODULES,
    "own modules": MODULES,
    "multiprocessing's main": MODULES,
    "torch: loggers": MODULES,
    "warnings filters": MODULES,
    "atexit": MODULES,
    "frames below": "frames below the script's own",
    "signal mask": "a handler for signal 47",
    "further descriptors": "an open memory file",
    "hash seed": "the hash seed",
    "addresses": "addresses in memory",
    "variables": "`HOLDFAST_…` variables",
}
"""Everything that differs with a forked worker, and the row of the table that says so."""
NOTICED_WHEN_SPAWNED = {"variables"}
FLAGS = ("--nproc-per-node", "2", "--max-restarts", "1", "-t", "3")
SCRIPT = (str(HERE / "state.py"), "PLACE", "two words", "${local_rank}", "$$x", "--flag=*")


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    return {name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}


def comparable(launch: Launch) -> dict[str, dict[str, Any]]:
    """Each worker's state; values of chance become whether all workers and tries had the same."""
    states = launch.states()
    chosen = [state.pop("own values") for state in states.values()]
    spread = {name: len({str(values[name]) for values in chosen}) for name in chosen[0]}
    for state in states.values():
        state.update(spread)
        variables = state.pop("environment")
        # This machine's loopback has two names.
        assert ipaddress.ip_address(socket.gethostbyname(variables.pop("MASTER_ADDR"))).is_loopback
        state["variables"] = {name: CHANCE.get(name, value) for name, value in variables.items()}
    return states


@pytest.mark.parametrize(
    ("method", "noticed"),
    [
        ("forkserver", set(NOTICED)),
        pytest.param("spawn", NOTICED_WHEN_SPAWNED, marks=pytest.mark.thorough),
    ],
)
def test_a_process_is_as_torchrun_makes_it(tmp_path: Path, method: str, noticed: set[str]) -> None:
    """Two tries of two workers: their processes, what the console shows, the files, the exit code."""
    theirs, ours = both(tmp_path, *FLAGS, "--start-method", method, *SCRIPT)
    assert (ours.exit_code(), theirs.exit_code()) == (0, 0), ours.agent.stderr[-3000:]
    assert ours.printed() == theirs.printed()
    assert ours.complained() == theirs.complained() and len(ours.complained()) == 4
    assert ours.files() == theirs.files()
    expected, found = comparable(theirs), comparable(ours)
    assert expected.keys() == found.keys() and len(found) == 4
    for name, state in expected.items():
        assert differences(state, found[name]) == noticed, name
        own = found[name]["variables"].keys() - state["variables"].keys()
        assert own and all(variable.startswith("HOLDFAST_") for variable in own)
        shared = {variable: found[name]["variables"][variable] for variable in state["variables"]}
        assert shared == state["variables"]
    assert {state["torch"] for state in found.values()} == {state["random"] for state in found.values()} == {4}


def test_what_a_script_can_notice_is_in_the_docs() -> None:
    assert documented(HEADING) == set(NOTICED.values())


@pytest.mark.thorough
def test_a_given_hash_seed_is_every_workers(tmp_path: Path) -> None:
    """So a script that depends on it does the same under both."""
    launch = start("holdfast", tmp_path, *FLAGS, *SCRIPT, env={"PYTHONHASHSEED": "7"})
    assert launch.exit_code() == 0
    spawned = start(
        "holdfast", tmp_path / "spawned", *FLAGS, "--start-method", "spawn", *SCRIPT, env={"PYTHONHASHSEED": "7"}
    )
    assert spawned.exit_code() == 0
    seeds = {state["own values"]["hash seed"] for one in (launch, spawned) for state in one.states().values()}
    assert len(seeds) == 1
