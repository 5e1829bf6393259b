"""`@hf.elastic`: a training function that is entered again, in the same process, when the size of the world changes.

The objects of a sharded model are cut for one rank of one world. When this process is given another rank, they are of
no use any more, but the copies of their state beside them are (replicas.py):

    hold         our objects are not built for the new assignment: `Reenter` leaves the function, through all its code
    start over   the old objects are forgotten; torch.distributed begins again under the new rank, answering locally, as
                 in a newcomer (old groups and meshes, and what torch remembers of them, are gone)
    enter        the function builds and tracks its objects for the new rank, and comes to its first step
    join         the members of the view settle, and fill their objects from the copies (reshard_live.py)

An assignment that comes in between, with yet another world, does the same again. The connections of the view that was
left are kept until the next one is joined: a rank may still be finishing the last collective in it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from holdfast.errors import Reenter, UsageError
from holdfast.torch_compat import forget_meshes
from holdfast.worker.collectives import groups
from holdfast.worker.collectives.elastic_group import state
from holdfast.worker.collectives.view_connections import ViewConnections

NEVER_OVER = sys.maxsize
"""The view of a local world: one that no revoke can mean. What is built in it is not disturbed by faults."""

P = ParamSpec("P")
R = TypeVar("R")


class _Process:
    """What there is once a process."""

    def __init__(self) -> None:
        self.depth = 0
        self.prepare: Callable[[], None] | None = None
        self.left: list[ViewConnections] = []


_process = _Process()


def elastic(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate the function that calls `hf.init()`, builds the model and trains it. It is called again, with the same
    arguments, whenever the number of workers has changed and the model is sharded; make everything that depends on the
    rank inside it."""

    @functools.wraps(function)
    def enter(*arguments: P.args, **named: P.kwargs) -> R:
        _process.depth += 1
        try:
            while True:
                try:
                    return function(*arguments, **named)
                except Reenter as leaving:
                    # Its frames, and those of the error it came with, hold the old model and the old group's sockets.
                    leaving.__cause__ = leaving.__context__ = leaving.__traceback__ = None
                _prepare()
        finally:
            _process.depth -= 1

    return enter


def is_inside() -> bool:
    """Return whether this process can enter its training function again."""
    return _process.depth > 0


def prepare_with(prepare: Callable[[], None]) -> None:
    """Set what is to be done before the function is entered again."""
    _process.prepare = prepare


def _prepare() -> None:
    if _process.prepare is None:
        raise UsageError("an elastic function was left without a job: call hf.init() in it")
    _process.prepare()


# --- torch.distributed


def start_over(rank: int, world_size: int, timeout: timedelta) -> None:
    """Begin again under another rank, with collectives that are answered locally, as if nothing had been before."""
    if state.connections is not None:
        _process.left.append(state.connections)
    state.connections = None
    dist.destroy_process_group()
    forget_meshes()
    gc.collect()  # models hold themselves: the old one goes before the new one comes
    excepthook = sys.excepthook  # torch wraps it each time a world begins
    groups.start(rank, world_size, None, view=NEVER_OVER, timeout=timeout)
    sys.excepthook = excepthook


def let_go() -> None:
    """Close the connections of views that were left, once the next view is joined."""
    while _process.left:
        _process.left.pop().retire()


def _let_go_for_good() -> None:
    while _process.left:
        _process.left.pop().retire().join(groups.CLOSE_TIMEOUT_S)


atexit.register(_let_go_for_good)
