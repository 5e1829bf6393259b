"""A worker whose script is a function: what `elastic_launch(config, function)(*arguments)` runs (holdfast/torchrun.py).

Where the function comes from, and why no pickle of a stranger's is ever read:

    inherited    `start_method="fork"`: the fork server is a fork of the calling program, so the function and its
                 arguments are in this process's memory, whatever they are: nothing is pickled
    received     the caller's pickle in a memory file (memfd) that the agent has inherited from it and that only this
                 user's processes can open, through /proc of the agent; on no disk and no network. As multiprocessing
                 does it: first the caller's main module is prepared, then the function is looked up in it

What the function returns goes the other way: pickled by value, appended to another memory file that the caller has.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing import process, spawn
from string import Template
from types import ModuleType
from typing import Any, NamedTuple

from holdfast.wire.launch_messages import CALL_VARIABLE, RESULTS_VARIABLE

MODULE = "holdfast.worker.launch.call_in_main"
"""What such a worker runs as its main module."""


class InheritedCall(NamedTuple):
    """A function, its arguments, and what a fork of the calling program had and a new worker has not."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    main: ModuleType
    argv: list[str]
    path: list[str]
    random_states: Mapping[str, Any]


inherited: InheritedCall | None = None
"""Set in a fork of the calling program, before it serves as a fork server."""


class FunctionResult(NamedTuple):
    """What a worker's function returned."""

    rank: int
    view: int
    value: Any


def main() -> None:
    """Call the function and deliver what it returns."""
    from torch.distributed.elastic.multiprocessing.errors import record

    path, results = os.environ.pop(CALL_VARIABLE, ""), os.environ.pop(RESULTS_VARIABLE)
    function, arguments = restore(inherited) if inherited is not None else receive(path)
    value = record(function)(*fill(arguments, os.environ["LOCAL_RANK"]))
    deliver(results, FunctionResult(int(os.environ["RANK"]), int(os.environ["HOLDFAST_VIEW"]), value))


def restore(call: InheritedCall) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make this process look like the fork of the calling program that it is."""
    sys.modules["__main__"] = call.main
    sys.argv, sys.path[:] = call.argv, call.path
    set_random_states(call.random_states)
    for number, name in ((1, "stdout"), (2, "stderr")):  # a notebook's own streams would bypass the log files
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
    return call.function, call.arguments


def receive(path: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that the calling program has put into its memory file, in a main module like its own."""
    with open(path, "rb") as file:  # noqa: PTH123
        data = io.BytesIO(file.read())
    current: Any = process.current_process()
    current._inheriting = True  # as multiprocessing does: a main module without a guard must not launch again
    try:
        spawn.prepare(pickle.load(data))
        call: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.load(data)
    finally:
        del current._inheriting
    return call


def is_being_prepared() -> bool:
    """Return whether this process is a worker that imports the main module of the calling program."""
    return bool(getattr(process.current_process(), "_inheriting", False))


def pickled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return what `receive` reads."""
    preparation = spawn.get_preparation_data("holdfast worker")
    preparation.pop("authkey", None)  # a worker makes one of its own
    return pickle.dumps(preparation) + pickle.dumps((function, arguments))


def fill(arguments: tuple[Any, ...], local_rank: str) -> tuple[Any, ...]:
    """Return the arguments with the local rank in the place of `${local_rank}`, as torchrun does it."""
    return tuple(
        Template(argument).safe_substitute(local_rank=local_rank) if isinstance(argument, str) else argument
        for argument in arguments
    )


def deliver(path: str, result: FunctionResult) -> None:
    """Append a result, whole: other workers write to the same file."""
    data = pickle.dumps(tuple(result))
    with open(path, "ab", buffering=0) as file:  # noqa: PTH123
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(len(data).to_bytes(8, "big") + data)


def collected(data: bytes) -> dict[int, Any]:
    """Return what the functions returned, by rank. Results of earlier views are dropped: those ranks ran again."""
    results, position = [], 0
    while position < len(data):
        end = position + 8 + int.from_bytes(data[position : position + 8], "big")
        results.append(FunctionResult(*pickle.loads(data[position + 8 : end])))
        position = end
    newest = max((result.view for result in results), default=0)
    found = {result.rank: result.value for result in results if result.view == newest}
    return dict(sorted(found.items()))


# --- random states: a fork has its parent's, in all libraries but `random`, which seeds itself again


def random_states() -> dict[str, Any]:
    """Return the states of generators that a new worker would seed."""
    states: dict[str, Any] = {}
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Give the generators the states of the calling program."""
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
