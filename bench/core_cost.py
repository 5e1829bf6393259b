"""What each event costs the core of the master, by the number of nodes: processor time, no network and no disk.

A job of N nodes and a fiftieth as many spare nodes lives through its start and three faults. A row is a kind of event:
its cost at each N, and the growth exponent between the two largest N (0: the cost does not depend on N, 1: it doubles
with N, 2: it quadruples). What has to touch every node, as a new view does, is measured as a whole; everything else for
each event. Orders are counted as they leave the master, and records as the journal has them.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import machine
import msgspec
from samples import markdown

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.durability import ImageReport, SnapshotStats
from holdfast.core.evolve import evolve
from holdfast.core.faults.failures import Failure, Signalled
from holdfast.core.faults.fault_table import typed
from holdfast.core.policy import next_deadline
from holdfast.core.settings import Settings
from holdfast.core.shard_map import ShardMap
from holdfast.core.state import JobState
from holdfast.core.transact import Turn, begin, transact
from holdfast.journal import SqliteJournal
from holdfast.master.master import collect_garbage_rarely
from holdfast.wire.control_messages import Command

BATCH_EVENTS = 4_096
"""As many reports a master takes in at once (master.py)."""
REPEATS = 64
"""How often what is cheap is measured."""
FLOOR_S = 20e-6
"""Below it, a cost is noise and has no exponent."""
VIEW_EXPONENT_MAX, EVENT_EXPONENT_MAX = 1.1, 0.2
SPARES_SHARE = 50

SESSIONS = {
    "none": lambda ranks: None,
    "ddp": lambda ranks: e.SessionInfo(),
    "hsdp": lambda ranks: e.SessionInfo(shard_map=ShardMap(max(ranks // 8, 1))),
    "fsdp": lambda ranks: e.SessionInfo(shard_map=ShardMap(ranks), replicas=1),
}


class Cost(NamedTuple):
    """One number about one kind of event at one size."""

    what: str
    value: float
    unit: str
    exponent_max: float | None = None
    """None: it has no exponent to keep."""
    goal: float | None = None
    """At 10,000 nodes."""


class CostlyJob:
    """A job of N nodes, and a clock that only the benchmark moves."""

    def __init__(self, nodes: int, workers: int, kind: str, directory: Path) -> None:
        self.nodes, self.workers = nodes, workers
        self.spares = max(nodes // SPARES_SHARE, 2)
        self.session = SESSIONS[kind](nodes * workers)
        self.settings = Settings(
            nodes_min=max(nodes * 9 // 10, 1), nodes_max=nodes, restarts_max=1_000, spare_nodes=self.spares
        )
        self.job, self.now = JobState(), 100.0
        self.path = directory / f"{nodes}-{kind}.sqlite"
        self.journal = SqliteJournal(self.path)
        list(self.journal.replay())
        self.saved = 0
        self.unsaved: list[r.Record] = []
        self.formed = Turn([], [])
        self.port = 20_000
        self._take(begin(self.job, "job", self.settings, self.now))

    def do(self, *events: e.Event) -> None:
        self._take(transact(self.job, events, self.now))

    def do_all(self, events: Sequence[e.Event]) -> None:
        for first in range(0, len(events), BATCH_EVENTS):
            self.do(*events[first : first + BATCH_EVENTS])

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := next_deadline(self.job)) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.do()
        self.now = until

    def _take(self, done: Turn) -> None:
        self.unsaved += [record for record in done.records if r.is_durable(record)]
        if any(isinstance(record, r.ViewFormed) for record in done.records):
            self.formed = done

    def save(self) -> int:
        """Write what happened to the journal; how many bytes it takes up there."""
        before = self._journal_bytes()
        self.journal.append(self.unsaved)  # type: ignore[arg-type]
        self.saved += len(self.unsaved)
        self.unsaved = []
        return self._journal_bytes() - before

    def _journal_bytes(self) -> int:
        import sqlite3

        with sqlite3.connect(self.path) as db:
            columns = [row[1] for row in db.execute("PRAGMA table_info(records)")]
            total = " + ".join(f"coalesce(length(CAST({column} AS BLOB)), 0)" for column in columns)
            return int(db.execute(f"SELECT coalesce(sum({total}), 0) FROM records").fetchone()[0])

    # --- who reports

    @property
    def members(self) -> list[str]:
        assert self.job.view is not None
        return [member.node_id for member in self.job.view.members]

    def who(self, node_id: str) -> dict[str, str]:
        return {"node_id": node_id, "incarnation": f"{node_id}-5f0c1d2e"}

    def here(self, node_id: str) -> dict[str, str | int]:
        assert self.job.view is not None
        return {**self.who(node_id), "view": self.job.view.number}

    def hello(self, number: int) -> e.Hello:
        self.port += 1
        info = e.NodeInfo(
            host=f"host-{number}",
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            machine_id=f"{number:032x}",
            boot_id=f"{number:032x}",
            pid=1_000,
            workers=self.workers,
            bulk_port=7_000,
            domain=f"rack-{number // 16}",
        )
        least, most = self.settings.nodes_min, self.settings.nodes_max
        spec = e.JobSpec(run_id="", nodes_min=least, nodes_max=most, restarts_max=1_000)
        return e.Hello(**self.who(node_name(number)), info=info, spec=spec, store_port=self.port)

    def started(self) -> list[e.Event]:
        pids = tuple(range(10_000, 10_000 + self.workers))
        return [e.WorkersStarted(**self.here(node_id), pids=pids) for node_id in self.members]

    def joined(self) -> list[e.Event]:
        assert self.session is not None
        return [e.ViewJoined(**self.here(node_id), session=self.session) for node_id in self.members]

    def step_times(self, node_id: str) -> e.Event:
        times = tuple(e.StepTime(local_rank, 0.1, 10) for local_rank in range(self.workers))
        return e.StepTimesReported(**self.here(node_id), step_times=times)

    def images(self, node_id: str, step: int) -> e.Event:
        assert self.job.view is not None
        member, ranks, number = self.job.members[node_id], self.nodes * self.workers, self.job.view.number
        shards = self.session.shards if self.session else 1
        held = tuple(
            ImageReport(at, member.first_rank + worker, shards, ranks // shards, number, is_replica)
            for worker in range(self.workers)
            for at in (step, step - 1)
            for is_replica in (False, True)
        )
        stats = SnapshotStats(every=1, step_s=0.1, stall_s=0.001, taken=step)
        return e.ImagesReported(**self.who(node_id), images=held, snapshot_stats=stats)

    def interrupted(self, node_id: str, local_rank: int) -> e.Event:
        step_error = e.StepError(
            rank=self.job.members[node_id].first_rank + local_rank,
            local_rank=local_rank,
            step=6,
            at=self.now,
            exception="RuntimeError",
            message="[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:29500",
            traceback="frame\n" * 60,
            collateral=True,
        )
        return e.StepInterrupted(**self.here(node_id), step_error=step_error)

    def killed(self, node_id: str) -> e.Event:
        number = self.job.view.number if self.job.view else 0
        failure = Failure(
            node_id=node_id,
            view=number,
            rank=self.job.members[node_id].first_rank,
            local_rank=0,
            pid=10_000,
            end=Signalled(9, "SIGKILL"),
            failed_at=self.now,
        )
        return e.WorkerFailed(**self.here(node_id), failure=typed(failure))

    def offer(self, node_ids: Sequence[str]) -> list[e.Event]:
        self.port += 1
        return [e.StoreOffered(**self.who(node_id), port=self.port) for node_id in node_ids]


def node_name(number: int) -> str:
    return f"node-{number:06d}"


def took(action: Callable[[], object]) -> float:
    gc.collect()
    began_s = time.process_time()
    action()
    return time.process_time() - began_s


def live(job: CostlyJob) -> Iterator[Cost]:
    """Let a job live, and yield what it cost."""
    hellos = [job.hello(number) for number in range(job.nodes + job.spares)]
    few = min(REPEATS, job.nodes // 2)
    first, middle, last = hellos[: job.nodes // 2], hellos[job.nodes // 2 :][:few], hellos[job.nodes // 2 + few :]
    job.do_all(first)
    one_by_one_s = took(lambda: [job.do(hello) for hello in middle])
    yield each("a node joins, one at a time", one_by_one_s, few)
    yield whole("the others join, and the first view is formed", took(lambda: (job.do_all(last), job.wait(1.0))))
    sizes = order_bytes(job)
    yield Cost("largest order", max(sizes), "B", goal=1_000)
    yield Cost("orders of a view", sum(sizes) / 1e6, "MB", VIEW_EXPONENT_MAX, 10.0)
    yield each("a node's workers have started", took(lambda: job.do_all(job.started())), job.nodes)
    spares = [node_name(number) for number in range(job.nodes + job.spares) if node_name(number) not in job.job.members]
    if job.session:
        yield each("a node has joined the view", took(lambda: job.do_all(job.joined())), job.nodes)
        job.do(e.StepCommitted(**job.here(job.members[0]), step=5))
        parked = [e.SparesChanged(**job.who(node_id), parked=job.workers) for node_id in spares]
        yield each("a spare node has parked its workers", took(lambda: [job.do(one) for one in parked]), len(parked))
    yield each("nothing has happened", took(lambda: [job.do() for _ in range(REPEATS)]), REPEATS)
    yield each("when to look again", took(lambda: [next_deadline(job.job) for _ in range(REPEATS)]), REPEATS)
    reports = [job.step_times(node_id) for node_id in job.members]
    job.do_all(reports)
    yield each("step times of a node", took(lambda: [job.do(one) for one in reports[:few]]), few)
    yield from snapshots(job)
    yield from broken_links(job, spares[:few])
    job.save()
    yield from killed_worker(job)
    if job.session:
        yield from lost_node(job)
    yield from replayed(job)


def snapshots(job: CostlyJob) -> Iterator[Cost]:
    """A second's reports of images, of all nodes; then those of a later step."""
    if not job.session:
        return
    job.now += 1.0
    reports = [job.images(node_id, 5) for node_id in job.members]
    yield each("images of a node, first round", took(lambda: job.do_all(reports)), job.nodes)
    job.now += 31.0
    reports = [job.images(node_id, 9) for node_id in job.members]
    yield each("images of a node, later", took(lambda: job.do_all(reports)), job.nodes)
    assert job.job.state.durability.memory >= 5, job.job.state.durability


def broken_links(job: CostlyJob, spares: Sequence[str]) -> Iterator[Cost]:
    """Links of spare nodes and of members break and come back."""

    def break_one(node_id: str) -> None:
        job.do(e.LinkBroke(**job.who(node_id)))
        job.do(msgspec.structs.replace(job.hello(int(node_id[5:])), parked=job.workers if node_id in spares else 0))

    members = job.members[: len(spares)]
    yield each("a spare node's link breaks and comes back", took(lambda: [break_one(n) for n in spares]), len(spares))
    yield each("a member's link breaks and comes back", took(lambda: [break_one(n) for n in members]), len(spares))


def killed_worker(job: CostlyJob) -> Iterator[Cost]:
    assert job.job.view is not None
    before, node_id = job.job.view.number, job.members[job.nodes // 2]
    job.do_all(job.offer(job.members[:REPEATS]))
    job.now += 1.0
    seconds = took(lambda: job.do(job.killed(node_id)))
    yield whole("a worker is killed: decided, next view, all orders made", seconds, goal_s=0.25)
    assert job.job.view.number == before + 1, "nothing was decided"
    sizes = order_bytes(job)
    yield Cost("largest order after it", max(sizes), "B", goal=1_000)
    yield Cost("its orders", sum(sizes) / 1e6, "MB", VIEW_EXPONENT_MAX, 10.0)
    recover(job)
    yield Cost("journal of the incident", job.save() / 1e6, "MB", goal=2.0)


def lost_node(job: CostlyJob) -> Iterator[Cost]:
    """Half of all ranks report a broken collective before the link of the node that is lost breaks."""
    assert job.job.view is not None
    before, node_id = job.job.view.number, job.members[-2]
    job.do_all(job.offer(job.members[:REPEATS]))
    job.now += 1.0
    members = job.members[: job.nodes // 2]
    echoes = [job.interrupted(member, worker) for member in members for worker in range(job.workers)]
    yield each("an interrupted step, one for every second rank", took(lambda: job.do_all(echoes)), len(echoes))
    job.do(e.LinkBroke(**job.who(node_id)))
    yield whole("a node is lost: a spare takes over, all orders made", took(lambda: job.wait(0.45)), goal_s=0.25)
    assert job.job.view.number == before + 1, "nothing was decided"
    recover(job)
    yield Cost("journal of the incident with its echoes", job.save() / 1e6, "MB", goal=2.0)


def recover(job: CostlyJob) -> None:
    job.do_all(job.started())
    if job.session:
        job.do_all(job.joined())
        job.do(e.StepCommitted(**job.here(job.members[0]), step=6))
    assert job.job.incidents.current is None, "the incident is not over"


def replayed(job: CostlyJob) -> Iterator[Cost]:
    """The journal, read and applied as a new master does."""
    job.journal.close()
    state, count = JobState(), job.saved

    def replay() -> None:
        journal = SqliteJournal(job.path)
        try:
            for entry in journal.replay():
                evolve(state, entry.record)
        finally:
            journal.close()

    seconds = took(replay)
    assert state.view == job.job.view, "the journal tells another story"
    yield Cost("replay of 100,000 records", seconds / count * 1e5, "s", EVENT_EXPONENT_MAX, 2.0)
    yield Cost("memory at its highest", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, "MB", goal=300.0)


def order_bytes(job: CostlyJob) -> list[int]:
    encode = msgspec.msgpack.Encoder().encode
    served = [addressed.order for addressed in job.formed.orders if isinstance(addressed.order, o.Serve)]
    return [len(encode(Command(1, order))) for order in served]


def each(what: str, seconds: float, count: int) -> Cost:
    return Cost(what, seconds / count * 1e6, "µs each", EVENT_EXPONENT_MAX)


def whole(what: str, seconds: float, goal_s: float | None = None) -> Cost:
    return Cost(what, seconds * 1e3, "ms", VIEW_EXPONENT_MAX, goal_s * 1e3 if goal_s is not None else None)


# --- the command


def exponent(costs: Sequence[Cost], sizes: Sequence[int]) -> float | None:
    """The growth between the two largest sizes; None if it says nothing."""
    if len(sizes) < 2 or costs[-1].exponent_max is None:
        return None
    floor = {"µs each": FLOOR_S * 1e6, "ms": FLOOR_S * 1e3}.get(costs[-1].unit, 1e-9)
    small, large = (max(cost.value, floor) for cost in costs[-2:])
    return math.log(large / small) / math.log(sizes[-1] / sizes[-2])


def cells(costs: Sequence[Cost], sizes: Sequence[int]) -> list[str]:
    last, grown = costs[-1], exponent(costs, sizes)
    goal = [f"≤ {last.goal:,g} {last.unit}"] if last.goal is not None else []
    goal += [f"exponent ≤ {last.exponent_max:g}"] if last.exponent_max is not None else []
    shown = "" if grown is None else f"{grown:.2f}"
    return [last.what, *(f"{cost.value:,.3g} {cost.unit}" for cost in costs), shown, ", ".join(goal)]


def measure(nodes: int, options: argparse.Namespace) -> list[Cost]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        costs = []
        for cost in live(CostlyJob(nodes, options.workers, options.kind, Path(directory))):
            print(f"{nodes:>7} nodes: {cost.what}: {cost.value:,.3g} {cost.unit}", flush=True)
            costs.append(cost)
        return costs


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1_000, 10_000], help="sizes, the smallest first")
    parser.add_argument("--workers", type=int, default=8, help="of a node")
    parser.add_argument("--kind", choices=list(SESSIONS), default="ddp", help="what the workers' state is like")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    collect_garbage_rarely()
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n")
    found = [measure(nodes, options) for nodes in options.nodes]
    rows = [list(costs) for costs in zip(*found, strict=True)]
    load_after = machine.load()
    heading = (
        f"{options.kind}, {options.workers} workers a node",
        *(f"{n:,}" for n in options.nodes),
        "exponent",
        "goal",
    )
    print("\n" + "\n".join(markdown(heading, [cells(row, options.nodes) for row in rows])))
    print(f"\nload average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after, "nodes": options.nodes}
        document = {
            **about,
            "costs": [
                {**row[-1]._asdict(), "values": [cost.value for cost in row], "exponent": exponent(row, options.nodes)}
                for row in rows
            ],
        }
        options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
