"""A spare: a worker that runs its script as far as it can without a rank, and waits there until it is given one.

A spare must never act as a rank that another process has. So it has none: it runs imports, builds the dataset, the
model and its wrapper, and stops at the first thing that depends on the rank, whichever comes first:

    os.environ["RANK"], LOCAL_RANK, WORLD_SIZE, ...         also before `hf.init()`: launch/spare_environment.py
    job.rank, job.world_size, job.local_rank
    dist.get_rank(), get_world_size(), new_group(), init_device_mesh(), every collective
    the first step                                          everything is built: the best place to wait

There the agent is told that the spare is parked (`WorkerReady`). When the spare is assigned to a rank, the call that
waited
returns that rank, and the process goes on as any newcomer does.

DistributedDataParallel's own calls are let through: what it asks of other ranks (are the shapes alike? rank 0's values)
is replaced when the newcomer joins, and its reducer is made again then. They are known by the frame that calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch.distributed as dist

from holdfast.core.environment_variables import PRIVATE_DEVICE_VARIABLE
from holdfast.core.events import SessionInfo
from holdfast.errors import LaunchError
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.wire.worker_messages import Assignment, Prepare, WorkerReady
from holdfast.worker import own_device
from holdfast.worker.agent_connection import AgentConnection, connect_to_agent, open_progress_page
from holdfast.worker.collectives.collective_retries import retries
from holdfast.worker.collectives.elastic_group import DATA_PARALLEL, asker
from holdfast.worker.collectives.waits import waits
from holdfast.worker.launch import spare_environment
from holdfast.worker.launch.child_setup import bind_to_numa
from holdfast.worker.membership import announce
from holdfast.worker.parallel import fsdp

_making = threading.Lock()
_parking: Parking | None = None


def current() -> Parking | None:
    """Return the spare that this process is, or was."""
    global _parking
    with _making:
        if _parking is None:
            spare_environment.watch()
            _parking = Parking() if spare_environment.is_watched() else None
        return _parking


class Parking:
    """The wait of one spare for its rank. Thread-safe: the first thread to need the rank waits, the others for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._agent: AgentConnection | None = None
        self._page: ProgressPage | None = None
        self._prepared: Prepare | None = None
        self.assignment: Assignment | None = None
        """What it was assigned to; None as long as it waits, or runs on towards the point where it waits."""
        self.on_assignment: list[Callable[[Assignment], None]] = []
        """What to bring up to date when the rank is known, before the script hears of it."""

    @property
    def agent(self) -> AgentConnection:
        """The connection to the agent. Made when it is first needed, which may be before `hf.init()`."""
        with self._lock:
            if self._agent is None:
                self._agent = connect_to_agent()
            return self._agent

    @property
    def page(self) -> ProgressPage:
        """The progress record."""
        with self._lock:
            if self._page is None:
                self._page = open_progress_page()
                self._page.move(pid=os.getpid(), phase=WorkerPhase.STARTING)
                page = self._page
                waits.show = lambda main, opened: page.set(waits=main, open=opened)
                retries.show = lambda count: page.set(retries=count)
            return self._page

    def prepare(self) -> Prepare | None:
        """Learn what the job's state is like, and import what a sharded model will need. None: assigned already."""
        with self._lock:
            if self._prepared is None:
                found = self.agent.wait_for_preparation()
                if not isinstance(found, Prepare):
                    return None
                self._prepared = found
                if found.shard_map.shards > 1 and not dist.is_initialized():
                    fsdp.warm_up()
            return self._prepared

    def wait(self) -> Assignment:
        """Wait until this spare is assigned to a rank. Ends the process if it is not needed any more."""
        with self._lock:
            if self.assignment is not None:
                return self.assignment
            if os.getpid() != self._pid:
                raise LaunchError("a process that a spare has started asks for a rank before the spare has one")
            page = self.page
            self.prepare()
            own_device.check_untouched(PRIVATE_DEVICE_VARIABLE in os.environ)
            page.move(phase=WorkerPhase.PARKED)
            self.agent.tell(WorkerReady(SessionInfo()))
            with waits:
                assignment = self.agent.wait_for_assignment(0)
            if assignment is None:
                raise SystemExit(0)
            page.move(view=assignment.view, phase=WorkerPhase.STARTING)
            spare_environment.release()
            announce(assignment)
            bind_to_numa(assignment.numa_binding, assignment.device_index)
            for callback in self.on_assignment:
                callback(assignment)
            self.assignment = assignment
            return assignment

    def wait_unless_asked_by_torch(self) -> None:
        """Wait for the rank, unless it is DistributedDataParallel that asks for it, from its constructor."""
        if self.assignment is None and asker() != DATA_PARALLEL:
            self.wait()
