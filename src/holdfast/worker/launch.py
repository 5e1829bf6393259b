"""How a script comes to its place: under Holdfast's agent, under torchrun, or alone.

    HOLDFAST_SOCKET is set     the worker enrols with its agent and is told its place, or that it is a spare
    RANK is set                another launcher: a plain process group by its variables, nothing is repaired
    neither                    a world of one

A spare of a job whose state is sharded waits here, as what it would build depends on its rank; of any other job it goes
on to its first step as if it were rank 0, with a make-believe group.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import rendezvous

from holdfast.core.events import SessionInfo
from holdfast.errors import UsageError
from holdfast.wire.progress import Phase, ProgressPage
from holdfast.wire.session import Place, Ready, Snapshots
from holdfast.worker import elastic
from holdfast.worker.collectives import groups
from holdfast.worker.line import SOCKET_VARIABLE, WORKER_VARIABLE, Line
from holdfast.worker.membership import Membership, announce, connect
from holdfast.worker.parallel import fully_sharded

PROGRESS_VARIABLE = "HOLDFAST_PROGRESS"


@dataclass
class Launch:
    """What `hf.init()` has found."""

    line: Line | None
    page: ProgressPage
    membership: Membership | None
    """None: nobody repairs this run."""
    replicas: int = 0
    checkpoint_dir: str = ""
    snapshots: Snapshots = Snapshots(every=-1)
    is_newcomer: bool = False
    """Whether the others train already: our group is make-believe until we join them."""


def launch(timeout: timedelta) -> Launch:
    """Find out where we are, and make torch.distributed ready. Its connections are closed before the interpreter ends:
    their threads call back into Python, which a dying interpreter does not answer."""
    atexit.register(groups.close)
    if os.environ.get(SOCKET_VARIABLE):
        return _under_agent(timeout)
    page = ProgressPage.private()
    if dist.is_initialized():
        return Launch(None, page, None)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        groups.start(rank, world_size, store, view=0, timeout=timeout)
    else:
        groups.start(0, 1, HashStore(), view=0, timeout=timeout)
    return Launch(None, page, None)


def _under_agent(timeout: timedelta) -> Launch:
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialised already: hf.init() does that, call it instead")
    page = ProgressPage.open(Path(os.environ[PROGRESS_VARIABLE]))
    page.move(pid=os.getpid(), phase=Phase.STARTING)
    line = Line(os.environ[SOCKET_VARIABLE], os.environ[WORKER_VARIABLE], _revoke)
    welcome = line.welcome()
    place = welcome.place or _as_spare(line, page, timeout)
    is_newcomer = welcome.place is None or welcome.place.newcomer
    membership = Membership(line, page, place, timeout, is_newcomer=is_newcomer)
    if place is not None:
        announce(place)
        store = None if is_newcomer else connect(place, timeout, timeout)
        view = elastic.NEVER_OVER if store is None else place.view
        groups.start(place.rank, place.world_size, store, view=view, timeout=timeout)
        page.move(view=place.view)
    return Launch(
        line, page, membership, welcome.replicas, welcome.checkpoint_dir, welcome.snapshots, is_newcomer
    )


def _as_spare(line: Line, page: ProgressPage, timeout: timedelta) -> Place | None:
    found = line.wait_for_preparation()
    if isinstance(found, Place):
        return found
    # A device is bound by the local rank, which a spare has not: it must not touch one before it is called.
    if not found.sharded and not torch.accelerator.is_available():
        groups.start(0, found.world_size, None, view=0, timeout=timeout)
        return None
    fully_sharded.warm_up()
    line.tell(Ready(SessionInfo()))
    page.move(phase=Phase.PARKED)
    return line.wait_for_place(0)


def _revoke(why: str, view: int) -> None:
    groups.revoke(why, view=view)


