"""How a script comes to its place: under Holdfast's agent, under torchrun, or alone.

    HOLDFAST_SOCKET is set     the worker enrols with its agent and is told its place, or that it is a spare
    RANK is set                another launcher: a plain process group by its variables, nothing is repaired
    neither                    a world of one

A spare goes on without a rank, with a group that answers locally, to the first thing that depends on one
(parking.py). Where there are accelerators it waits here: it must not touch a device before it knows which is its own
(own_device.py).
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from holdfast.core.shard_map import ShardMap
from holdfast.errors import DeviceError, LaunchError, UsageError
from holdfast.torch_compat import HashStore, warn_if_untested
from holdfast.util.logs import get_logger
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.wire.worker_messages import SnapshotSettings, Welcome
from holdfast.worker import elastic, own_device, parking
from holdfast.worker.agent_connection import AgentConnection, connect_to_agent, open_progress_page
from holdfast.worker.collectives import groups, watchdogs
from holdfast.worker.collectives.collective_retries import retries
from holdfast.worker.collectives.waits import waits
from holdfast.worker.launch import build_locks
from holdfast.worker.launch.error_file import SOCKET_VARIABLE, write_error_file
from holdfast.worker.membership import Membership, announce, connect
from holdfast.worker.parking import Parking

log = get_logger(__name__)

STUCK_EXIT_CODE = 1
"""The error file says more."""


@dataclass
class Bootstrap:
    """What `hf.init()` has found."""

    agent: AgentConnection | None
    page: ProgressPage
    membership: Membership | None
    """None: this run is not repaired."""
    replicas: int = 0
    are_replicas_default: bool = False
    checkpoint_dir: str = ""
    snapshots: SnapshotSettings = SnapshotSettings(every=-1)
    is_newcomer: bool = False
    """Whether the others train already: our group answers locally until we join them."""
    spare: Parking | None = None
    """The spare that this worker is, or was until it was assigned."""

    @property
    def expected_shards(self) -> ShardMap | None:
        """The shards that the ranks have which train already, as far as the agent knows."""
        if self.membership is not None and self.membership.assignment is not None:
            return self.membership.assignment.shard_map
        prepared = self.spare.prepare() if self.spare is not None else None
        return prepared.shard_map if prepared is not None else None


def launch(timeout: timedelta) -> Bootstrap:
    """Find out where we are, and make torch.distributed ready. Its connections are closed before the interpreter ends:
    their threads call back into Python, which a dying interpreter does not answer."""
    warn_if_untested()
    atexit.register(groups.close)
    if os.environ.get(SOCKET_VARIABLE):
        return _under_agent(timeout)
    page = ProgressPage.private()
    if dist.is_initialized():
        return Bootstrap(None, page, None)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if "LOCAL_RANK" in os.environ:
            own_device.take(int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        groups.start(rank, world_size, store, view=0, timeout=timeout)
    else:
        groups.start(0, 1, HashStore(), view=0, timeout=timeout)
    return Bootstrap(None, page, None)


def _under_agent(timeout: timedelta) -> Bootstrap:
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialised already: hf.init() does that, call it instead")
    groups.on_stuck(end_this_process)
    for problem in watchdogs.silence(os.environ, own_device.accelerator_module() is not None):
        log.warning("watchdog-variable-set", problem)
    if (spare := parking.current()) is not None:
        return _as_spare(spare, timeout)
    build_locks.install()  # a worker that was not forked has not done so yet
    page = open_progress_page()
    page.move(pid=os.getpid(), phase=WorkerPhase.STARTING)
    waits.show = lambda main, opened: page.set(waits=main, open=opened)
    retries.show = lambda count: page.set(retries=count)
    agent = connect_to_agent()
    welcome = agent.welcome()
    assignment = welcome.assignment
    if assignment is None:
        raise LaunchError("the agent has no rank for this worker, which is no spare: start it again")
    is_newcomer = assignment.newcomer
    membership = Membership(agent, page, assignment, timeout, is_newcomer=is_newcomer)
    announce(assignment)
    own_device.take(assignment.device_index, assignment.local_world_size)
    store = None if is_newcomer else connect(assignment, timeout, timeout)
    view = elastic.NEVER_OVER if store is None else assignment.view
    groups.start(assignment.rank, assignment.world_size, store, view=view, timeout=timeout)
    membership.replay_answers() if is_newcomer else groups.record_answers()
    page.move(view=assignment.view)
    return _under(welcome, agent, page, membership, is_newcomer)


def _as_spare(spare: Parking, timeout: timedelta) -> Bootstrap:
    """Begin without a rank, or with the one that was waited for already: as a newcomer in either case."""
    agent, page = spare.agent, spare.page
    welcome = agent.welcome()
    prepared = spare.prepare()
    if prepared is None or torch.accelerator.is_available():
        spare.wait()
    membership = Membership(agent, page, spare.assignment, timeout, is_newcomer=True)
    if (assignment := spare.assignment) is not None:
        own_device.take(assignment.device_index, assignment.local_world_size)
        groups.start(assignment.rank, assignment.world_size, None, view=elastic.NEVER_OVER, timeout=timeout)
        membership.replay_answers()
    else:
        assert prepared is not None
        need_rank = spare.wait_unless_asked_by_torch
        groups.start_without_rank(prepared.world_size, view=elastic.NEVER_OVER, timeout=timeout, need_rank=need_rank)
        spare.on_assignment.append(lambda assignment: groups.assume_rank(assignment.rank, assignment.world_size))
        spare.on_assignment.append(membership.assigned)
    return _under(welcome, agent, page, membership, True, spare)


def _under(
    welcome: Welcome,
    agent: AgentConnection,
    page: ProgressPage,
    membership: Membership,
    is_newcomer: bool,
    spare: Parking | None = None,
) -> Bootstrap:
    return Bootstrap(
        agent,
        page,
        membership,
        replicas=welcome.replicas,
        are_replicas_default=welcome.are_replicas_default,
        checkpoint_dir=welcome.checkpoint_dir,
        snapshots=welcome.snapshots,
        is_newcomer=is_newcomer,
        spare=spare,
    )


def end_this_process(why: str) -> NoReturn:
    """Have the agent replace this worker: communicators of a view that is over cannot be freed, and the main thread, or
    kernels on the device, may hang in them. From a side thread, so an exception would not be seen."""
    write_error_file(DeviceError(f"{why}: this process is replaced"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STUCK_EXIT_CODE)
