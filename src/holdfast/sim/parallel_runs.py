"""Many runs at once: a process for each processor, each of which takes the next run when it is through with one.

Scenarios and results cross as MessagePack over a pipe. A run depends on its scenario and its seed alone, so the results
are the same whatever the number of processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

import msgspec

from holdfast.errors import HoldfastError
from holdfast.sim.scenario import Scenario
from holdfast.sim.simulation import SimulatedRun, Simulation


class RunTask(msgspec.Struct, frozen=True):
    """One run to be made."""

    scenario: Scenario
    seed: int


class RunDone(msgspec.Struct, frozen=True, tag="done"):
    run: SimulatedRun


class RunShare(msgspec.Struct, frozen=True, tag="share"):
    """How much of a run is done, from 0 to 1."""

    share: float


_encode = msgspec.msgpack.Encoder().encode
_decode_task = msgspec.msgpack.Decoder(RunTask).decode
_decode_reply = msgspec.msgpack.Decoder(RunDone | RunShare).decode

OnShare = Callable[[float], None]


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(tasks: Sequence[RunTask], processes: int = 0, on_share: OnShare = lambda _: None) -> list[SimulatedRun]:
    """Make the runs; return their results in the same order. `on_share` is told the share of all that is done."""
    processes = min(processes or processors(), len(tasks))
    if processes <= 1:
        return _run_here(tasks, on_share)
    return _Crew(tasks, processes, on_share).run()


def _run_here(tasks: Sequence[RunTask], on_share: OnShare) -> list[SimulatedRun]:
    def told(index: int) -> OnShare:
        return lambda share: on_share((index + share) / len(tasks))

    runs = [_run(task, told(index)) for index, task in enumerate(tasks)]
    on_share(1.0)
    return runs


def _run(task: RunTask, on_share: OnShare) -> SimulatedRun:
    """Make a run without looking for garbage in cycles: a run makes none, and with ten thousand nodes in memory each
    look takes as long as a decision."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return Simulation(task.scenario, task.seed).run(on_share)
    finally:
        if was_enabled:
            gc.enable()


class _Crew:
    """The processes, and who does what."""

    def __init__(self, tasks: Sequence[RunTask], processes: int, on_share: OnShare) -> None:
        self._tasks, self._on_share = tasks, on_share
        self._shares = [0.0] * len(tasks)
        self._runs: dict[int, SimulatedRun] = {}
        self._next = 0
        self._at_work: dict[Connection, int] = {}
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[Connection] = []
        for _ in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self) -> list[SimulatedRun]:
        try:
            for pipe in self._pipes:
                self._give(pipe)
            while self._at_work:
                ready = wait(list(self._at_work))
                for pipe in [one for one in self._at_work if one in ready]:
                    self._hear(pipe)
        finally:
            for process in self._processes:
                process.kill()
                process.join()
        return [self._runs[index] for index in range(len(self._tasks))]

    def _give(self, pipe: Connection) -> None:
        if self._next < len(self._tasks):
            self._at_work[pipe] = self._next
            pipe.send_bytes(_encode(self._tasks[self._next]))
            self._next += 1
        else:
            self._at_work.pop(pipe, None)

    def _hear(self, pipe: Connection) -> None:
        index = self._at_work[pipe]
        try:
            reply = _decode_reply(pipe.recv_bytes())
        except (EOFError, OSError):
            raise HoldfastError("a process of the simulation has died: is there enough memory?") from None
        match reply:
            case RunShare(share=share):
                self._shares[index] = share
            case RunDone(run=run):
                self._runs[index], self._shares[index] = run, 1.0
                self._give(pipe)
        self._on_share(sum(self._shares) / len(self._tasks))


def _serve(pipe: Connection) -> None:
    """Make runs until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends this process
    try:
        while True:
            task = _decode_task(pipe.recv_bytes())
            run = _run(task, lambda share: pipe.send_bytes(_encode(RunShare(share))))
            pipe.send_bytes(_encode(RunDone(run)))
    except (EOFError, BrokenPipeError):
        return
