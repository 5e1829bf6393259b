"""The price of a step without faults: blocks of steps of all contenders in turn, within seconds of each other.

All jobs are started first. Each waits at a gate after every block of steps, asleep; the gates are opened one job at a
time, in each round in another order. So what else the machine does hits all alike, and a ratio is one of neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from contenders import Contender, Job, Workload

PLAIN = "plain"
BLOCK_LIMIT_S = 120.0
NOWHERE = -1
"""Before the first gate. Some count their steps from 0, and stand at a gate after that one."""


@dataclass(frozen=True)
class Block:
    """Steps of one contender in a row, on rank 0, without the one that crossed the gate."""

    round: int
    key: str
    name: str
    mean_ms: float
    median_ms: float


def measure(everyone: list[Contender], workload: Workload, rounds: int, start_limit_s: float) -> Iterator[Block]:
    with ExitStack() as stack:
        jobs = []
        for contender in everyone:
            job = stack.enter_context(Job(contender, workload))
            contender.launch(job)
            jobs.append((job, _reach(job, NOWHERE, start_limit_s)))
        for round_number in range(rounds + 1):
            random.shuffle(jobs)
            jobs = [(job, _through(job, gate)) for job, gate in jobs]
            if round_number:  # the first warms up
                yield from (_block(round_number, job, gate) for job, gate in jobs)


def waiting_at(job: Job, after: int) -> int | None:
    """The gate at which all ranks of a job stand, if it is a later one."""
    ranks = job.workload.ranks
    last = dict.fromkeys(range(ranks), NOWHERE)
    for entry in job.diary.entries:
        if entry.event == "step":
            last[entry.rank] = max(entry.step, last[entry.rank])
    gate = min(last.values())
    stands = gate == max(last.values()) and gate % job.workload.gate_steps == 0
    return gate if stands and gate > after else None


def _through(job: Job, gate: int) -> int:
    """One block of steps, up to the next gate."""
    (job.directory / "gates" / str(gate)).touch()
    return _reach(job, gate, BLOCK_LIMIT_S)


def _reach(job: Job, after: int, limit_s: float) -> int:
    gate = job.wait_for(lambda: waiting_at(job, after), limit_s)
    if gate is None:
        raise RuntimeError(f"{job.contender.name} stands still:\n{job.run.output()}")
    return gate


def _block(round_number: int, job: Job, gate: int) -> Block:
    steps = range(gate - job.workload.gate_steps + 1, gate + 1)
    at = {e.step: e.at for e in job.diary.entries if e.event == "step" and e.rank == 0}
    times_ms = [(at[after] - at[before]) * 1e3 for before, after in pairwise(steps)]
    mean_ms = sum(times_ms) / len(times_ms)
    return Block(round_number, job.contender.key, job.contender.name, mean_ms, median(times_ms))


def ratios(blocks: Sequence[Block], key: str, value: str) -> list[float]:
    """Of each round: a contender's block by the plain script's of the same round."""
    plain = {block.round: getattr(block, value) for block in blocks if block.key == PLAIN}
    return [getattr(block, value) / plain[block.round] for block in blocks if block.key == key]
