"""Examines a node: a fork of the node's warm server, which lives for one check and does the tasks it is sent.

Its standard output is a socket to the agent: a task comes as a line of JSON, its result goes back as another. What
anything here prints goes to standard error. It ends when the agent closes its end, or dies.

Of two nodes that are paired, the one with rank 0 has the store at which they meet; its port is told in every result.
The collectives go through the communicator of the job's own groups.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.checks.accelerators import registry
from holdfast.checks.accelerators.base import Accelerator
from holdfast.checks.stages import check_alone, problem_of
from holdfast.core.health.findings import CheckProblem, CheckResult, CheckTask
from holdfast.errors import HoldfastError
from holdfast.worker.launch.store_host import open_store

if TYPE_CHECKING:
    from holdfast.torch_compat import TCPStore


class CheckAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """What the examiner is told once, as its argument."""

    accelerator: str = ""
    """Empty: to be found out."""
    address: str = "127.0.0.1"
    directory: str = "."
    """Whose disk is examined."""
    workers: int = 1
    pair_timeout_s: float = 20.0
    """Of a whole pair task. Less than the agent waits: whose partner is gone is to live on, with its store."""


class Examiner:
    """One check of this node."""

    def __init__(self, assignment: CheckAssignment) -> None:
        self._assignment = assignment
        self._accelerator: Accelerator | None = None
        self._store: TCPStore | None = None

    def do(self, task: CheckTask) -> CheckResult:
        """Never raises: whatever goes wrong is the result."""
        began_at = time.monotonic()
        try:
            result = self._do(task)
        except HoldfastError as error:
            result = CheckResult(problems=(CheckProblem("examination", "check-failed", str(error)),))
        except Exception as error:  # a driver, a plug-in or torch may raise anything
            stage = "all-reduce" if task.kind == "pair" else "examination"
            result = CheckResult(problems=(problem_of(self._chosen(), stage, error),))  # type: ignore[arg-type]
        port = self._store.port if self._store else 0
        return msgspec.structs.replace(result, store_port=port, took_s=time.monotonic() - began_at)

    def _do(self, task: CheckTask) -> CheckResult:
        accelerator = self._chosen()
        store = self._own_store()
        if task.kind == "ready":
            return CheckResult(accelerator=accelerator.name)
        if task.kind == "pair":
            return self._pair(task, accelerator, store)
        assignment = self._assignment
        directory = Path(assignment.directory)
        timings, problems = check_alone(accelerator, directory, assignment.workers, task.stages)
        return CheckResult(timings=tuple(timings), problems=tuple(problems), accelerator=accelerator.name)

    def _chosen(self) -> Accelerator:
        if self._accelerator is None:
            if self._assignment.accelerator:
                self._accelerator = registry.load(self._assignment.accelerator)
            else:
                self._accelerator, problems = registry.detect()
                for problem in problems:
                    sys.stderr.write(f"{problem}\n")
        return self._accelerator

    def _own_store(self) -> TCPStore:
        if self._store is None:
            family = socket.AF_INET6 if ":" in self._assignment.address else socket.AF_INET
            with socket.create_server((self._assignment.address, 0), family=family) as listener:
                self._store = open_store(listener.fileno(), listener.getsockname()[1])
        return self._store

    def _pair(self, task: CheckTask, accelerator: Accelerator, own: TCPStore) -> CheckResult:
        from torch.distributed import TCPStore

        from holdfast.worker.check_pairs import Pairing, TimeLeft

        time_left = TimeLeft(self._assignment.pair_timeout_s)
        store: Any = own
        if task.rank != 0:
            where = task.store_host, task.store_port
            store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=time_left())
        timings, problems = Pairing(accelerator, store, task, time_left).measure()
        return CheckResult(timings=tuple(timings), problems=tuple(problems), accelerator=accelerator.name)


def serve(connection: socket.socket, examiner: Examiner) -> None:
    """Run the agent's tasks until it has no more."""
    decoder = msgspec.json.Decoder(CheckTask)
    with connection.makefile("rb") as lines:
        for line in lines:
            connection.sendall(msgspec.json.encode(examiner.do(decoder.decode(line))) + b"\n")


def main() -> None:
    """Run the examiner, in a process of its own."""
    assignment = msgspec.json.decode(sys.argv[1], type=CheckAssignment)
    connection = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    serve(connection, Examiner(assignment))
    sys.stderr.flush()
    os._exit(0)  # threads of a communicator that hangs must not keep it


if __name__ == "__main__":
    main()
