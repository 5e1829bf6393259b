"""Transcripts: a scenario in a tiny language, and below each line what the core made of it.

A line that begins with `>` is an input; the indented lines after it are what is expected: records as
`kind what: why`, orders as `-> life what`, and when the job wants to be woken. Several events joined by `;` are one
batch. `#` begins a comment. Inputs:

    job nodes=1:2 restarts=3 workers=2          settings by their names; always first. Also recovery=retry,exit; and of
                                                workers that speak to Holdfast, shards=4 replicas=1 fixed=1
    hello a [dead=a.1] [rank=0] [workers=4] [boot=boot-2] [pid=7] [port=0]
    started a        succeeded a [0]        offers a [port]
    failed a [0] [exit=1|signal=9|oom|unstartable] [collateral] [view=1]
    settled a        committed a [8]        parked a 1                   stalled a 5 4 (their steps)
    stumbled a [0] [error=ValueError]       by another's doing, or by an error of its own
    broke a          silent a               leaving a [signal=15]        gone a
    drain a          resize 3
    (any of them)    [life=2]: from here on the node's events come from its second life
    wait 0.5         let so many seconds pass
    wake             go to the next deadline
    master restarts [down=2.5]
    status           the phase, the view and the budget
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.faults.failures import End, Exited, NotStarted, OutOfMemory, Signalled, describe
from holdfast.core.health.findings import ALONE, PAIRED, CheckProblem, CheckResult, Timing
from holdfast.core.policy import next_deadline
from holdfast.core.sentences import sentence
from holdfast.core.shard_map import ShardMap
from holdfast.core.state import Finished, Gathering, Serving
from holdfast.core.strategies import Strategy
from support.world import START, World

INTEGERS = ("restarts", "workers", "spares", "spare_nodes", "rung_tries_max", "shards", "replicas", "fixed")
SWITCHES = ("node_check", "exclude_straggler", "check_only")
SIGNALS = {9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def render(path: Path) -> str:
    """The transcript as it would read today: its inputs and comments, with the core's answers of now."""
    told: list[str] = []
    scenario = Scenario()
    for line in path.read_text().splitlines():
        if line.startswith("> "):
            told.append(line)
            told += [f"  {answer}" for answer in scenario.answer(line[2:])]
        elif not line.startswith("  "):
            told.append(line)
    return "\n".join(told) + "\n"


class Scenario:
    """Follows a transcript's inputs."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.records_told = 0
        self.orders_told = 0

    def answer(self, text: str) -> Iterator[str]:
        words = text.split()
        if words[0] == "job":
            self.world = _world(words[1:])
            yield from self._news(self.world)
            return
        assert self.world is not None, "the first line must be `job`"
        if words == ["status"]:
            yield from _status(self.world)
            return
        before = self.world.now
        _perform(self.world, text, words)
        if self.world.now != before:
            yield f"at {self.world.now - START:.3f}"
        yield from self._news(self.world)

    def _news(self, world: World) -> Iterator[str]:
        records, said = world.history[self.records_told :], world.said[self.orders_told :]
        self.records_told, self.orders_told = len(world.history), len(world.said)
        yield from (_record(record) for record in records)
        yield from (_order(addressed) for addressed in said)
        if not records and not said:
            yield "(nothing)"
        if (deadline := next_deadline(world.job)) is not None:
            yield f"(wakes in {deadline - world.now:.3f} s)"


def _perform(world: World, text: str, words: list[str]) -> None:
    match words:
        case ["wait", seconds]:
            world.wait(float(seconds))
        case ["wake"]:
            world.wake()
        case ["master", "restarts", *options]:
            world.restart_master(float(_options(options).get("down", "0")))
        case _:
            world.do(*(_event(world, part.split()) for part in text.split(";")))


def _world(words: list[str]) -> World:
    options = _options(words)
    nodes_min, _, nodes_max = options.pop("nodes").partition(":")
    integers: dict[str, Any] = {key: int(options.pop(key)) for key in INTEGERS if key in options}
    rungs = options.pop("recovery", "")
    recovery: dict[str, Any] = {"recovery": tuple(Strategy(word) for word in rungs.split(","))} if rungs else {}
    session = e.SessionInfo(
        shard_map=ShardMap(integers.pop("shards", 1)),
        replicas=integers.pop("replicas", 0),
        resizable=not integers.pop("fixed", 0),
    )
    switches: dict[str, Any] = {key: options.pop(key) == "yes" for key in SWITCHES if key in options}
    seconds: dict[str, Any] = {key: float(value) for key, value in options.items()}
    nodes = (int(nodes_min), int(nodes_max or nodes_min))
    return World(nodes=nodes, session=session, **integers, **recovery, **switches, **seconds)


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _event(world: World, words: list[str]) -> e.Event:
    kind, node_id, *rest = words
    options = _options([word for word in rest if "=" in word])
    bare = [word for word in rest if "=" not in word]
    numbers = [int(word) for word in bare if word.isdigit()]
    number = numbers[0] if numbers else None
    if "life" in options:
        world.incarnations[node_id] = int(options["life"])
    if kind == "hello":
        return _hello(world, node_id, options)
    if kind == "failed":
        view = int(options["view"]) if "view" in options else None
        return world.failed(node_id, number or 0, view=view, end=_end(options, bare), collateral="collateral" in bare)
    makers: dict[str, Callable[[], e.Event]] = {
        "started": lambda: world.started(node_id),
        "succeeded": lambda: world.succeeded(node_id, number or 0),
        "offers": lambda: world.offered(node_id, number),
        "broke": lambda: world.broke(node_id),
        "silent": lambda: world.silent(node_id),
        "leaving": lambda: world.leaving(node_id, int(options.get("signal", "15"))),
        "gone": lambda: world.gone(node_id),
        "settled": lambda: world.settled(node_id),
        "committed": lambda: world.committed(node_id, 8 if number is None else number),
        "parked": lambda: world.parked(node_id, number or 0),
        "stalled": lambda: world.stalled(node_id, *numbers),
        "stumbled": lambda: world.stumbled(node_id, number or 0, error=options.get("error", "")),
        "examined": lambda: world.examined(node_id, _result(world, node_id, options, bare)),
        "drain": lambda: e.DrainRequested(node_id=node_id, why="asked to"),
        "resize": lambda: e.ResizeRequested(nodes=int(node_id), why="asked to"),
    }
    return makers[kind]()


def _result(world: World, node_id: str, options: dict[str, str], bare: list[str]) -> CheckResult:
    """Of the task it was told: every stage takes 10 ms, or as many times that as `slow=` says."""
    order = world.told[world.life(node_id)]
    assert isinstance(order, o.Hold) and order.check
    stages = PAIRED if order.check.kind == "pair" else ALONE if order.check.kind == "alone" else ()
    took_s = 0.01 * float(options.get("slow", "1"))
    wrong = (CheckProblem("matmul", "wrong-result", "the product is wrong", 0),) if "wrong" in bare else ()
    timings = tuple(Timing(stage, took_s, 0.001) for stage in stages)
    return CheckResult(timings=timings, problems=wrong, store_port=29_900)


def _hello(world: World, node_id: str, options: dict[str, str]) -> e.Hello:
    return world.hello(
        node_id,
        dead_incarnations=[options["dead"]] if "dead" in options else [],
        store_port=int(options["port"]) if "port" in options else None,
        workers=int(options.get("workers", world.workers)),
        requested_rank=int(options["rank"]) if "rank" in options else None,
        boot_id=options.get("boot", f"boot-1-of-{node_id}"),
        pid=int(options.get("pid", "1000")),
    )


def _end(options: dict[str, str], bare: list[str]) -> End:
    if "signal" in options:
        number = int(options["signal"])
        return Signalled(number, SIGNALS[number])
    if "oom" in bare:
        return OutOfMemory("oom_kill rose")
    if "unstartable" in bare:
        return NotStarted("no such file")
    return Exited(int(options.get("exit", "1")))


# --- how records and orders read


def _record(record: r.Record) -> str:
    return f"{record.__struct_config__.tag} {_told(record)}".rstrip()


def _told(record: r.Record) -> str:
    match record:
        case r.JobCreated(settings=s):
            return f"nodes {s.nodes_min}:{s.nodes_max}, restarts {s.restarts_max}"
        case r.TermBegan(term=term):
            return f"{term}"
        case r.NodeJoined(incarnation=life, info=info):
            return f"{life}, workers {info.workers}"
        case r.NodeLost(incarnation=life, certain=certain, why=why):
            return f"{life} {'for certain' if certain else 'perhaps'}: {why}"
        case r.NodeDraining(incarnation=life, signal=signal, why=why):
            return f"{life}, signal {signal}: {why}"
        case r.NodeLeftRecord(incarnation=life):
            return life
        case r.GatheringBegan(at=at, deadline=deadline, why=why):
            return f"for {deadline - at:.0f} s: {why}"
        case r.ViewFormed(view=view, why=why):
            members = " ".join(f"{m.incarnation}[{_ranks(m.first_rank, m.workers)}]" for m in view.members)
            kept = f", {_kept(view.planned, view.strategy)}" if view.keeps_workers else ""
            return f"{view.number} {members}{kept}, store {view.store_node_id}:{view.store_port}: {why}"
        case r.WorkersStartedRecord(node_id=node_id, view=number):
            return f"{node_id} in view {number}"
        case r.WorkerSucceededRecord(node_id=node_id, local_rank=local_rank, view=number):
            return f"{node_id}/{local_rank} in view {number}"
        case r.WorkerFailedRecord(failure=failure, late=late):
            return f"{'late, ' if late else ''}{describe(failure)}"
        case r.ViewJoinedRecord(node_id=node_id, view=number):
            return f"{node_id} in view {number}"
        case r.StepInterruptedRecord(node_id=node_id, step_error=step_error):
            return f"{node_id}/{step_error.local_rank} in step {step_error.step}: {step_error.exception}"
        case r.WorkersStalledRecord(node_id=node_id, stalled_s=stalled_s):
            return f"{node_id} for {stalled_s:.0f} s"
        case r.WorkersMovedRecord(node_id=node_id):
            return node_id
        case r.StepCommittedRecord(view=number, step=step):
            return f"step {step} of view {number}"
        case r.JobResized(nodes=nodes, why=why):
            return f"{nodes}: {why}"
        case r.SparesChangedRecord(node_id=node_id, parked=parked):
            return f"{node_id}: {parked}"
        case r.IncidentOpened(number=number, kind=kind, cause=cause):
            return f"{number} {kind}: {cause}"
        case r.IncidentDecided(number=number, kind=kind, strategy=strategy, counted=counted, why=why):
            return f"{number} {kind}, {strategy.value}{', counted' if counted else ''}: {why}"
        case r.IncidentClosed(number=number, kind=kind, cause=cause):
            spent = f"view {record.view_before} to {record.view_after}, {record.at - record.detected_at:.3f} s"
            proof = f", step {record.step}" if record.step >= 0 else ""
            spent = f"{spent}{proof}, restarts {record.restarts_used}, folded {record.collateral}"
            return f"{number} {kind}, {spent}: {cause}"
        case r.JobFinished(outcome=outcome, exit_code=code, why=why):
            return f"{outcome.value}, code {code}: {why}"
        case r.CheckConcluded() | r.NodeSuspected() | r.NodeReadmitted() | r.CheckupBegan() | r.RoundBegan():
            return sentence(record)
        case r.NodeCheckedRecord() | r.CheckupDropped():
            return sentence(record)
        case r.LinkBrokeRecord(node_id=node_id) | r.LinkRestored(node_id=node_id):
            return node_id
        case r.StoreOfferedRecord(node_id=node_id, port=port):
            return f"{node_id}:{port}"
        case r.NodeRefused(incarnation=life, why=why):
            return f"{life}: {why}"
        case _:
            return sentence(record)


def _order(addressed: o.Addressed) -> str:
    match addressed.order:
        case o.Serve() as serve:
            place = f"group rank {serve.group_rank} of {serve.group_world_size}, ranks from {serve.first_rank}"
            here = " here" if serve.store_here else ""
            kept = f", {_kept(serve.planned, serve.strategy)}" if serve.keeps_workers else ""
            ended = f", end {' '.join(map(str, serve.replaced))} first" if serve.replaced else ""
            spares = f", spares {serve.spares}" if serve.spares else ""
            store = f"store {serve.store_port}{here}"
            what = f"serve view {serve.view}: {place} of {serve.world_size}, {store}{kept}{ended}{spares}"
        case o.Hold(why=why) as hold:
            release = f", release for view {hold.release}" if hold.release else ""
            spares = f", spares {hold.spares}" if hold.spares else ""
            check = f", {hold.check.kind} in round {hold.check.round}" if hold.check else ""
            partner = f" with {hold.check.partner}" if hold.check and hold.check.partner else ""
            what = f"hold{release}{spares}{check}{partner}: {why}"
        case o.Exit(exit_code=code):
            what = f"exit {code}"
        case o.Refuse(retry_after_s=retry_after_s, rejoin=rejoin):
            when = "for good" if retry_after_s is None else f"for {retry_after_s:.1f} s"
            what = "refuse: rejoin" if rejoin else f"refuse: {when}"
    return f"-> {addressed.incarnation} {what}"


def _kept(planned: bool, strategy: Strategy | None) -> str:
    return f"{'planned' if planned else 'kept'} by {strategy.value if strategy else 'nothing'}"


def _ranks(first: int, workers: int) -> str:
    return f"{first}" if workers == 1 else f"{first}-{first + workers - 1}"


def _status(world: World) -> Iterator[str]:
    job = world.job
    match job.phase:
        case Gathering(why=why):
            yield f"gathering: {why}"
        case Serving():
            yield f"serving view {world.view_number} with {' '.join(world.members)}"
        case Finished(record=record):
            yield f"finished: {record.outcome.value}"
    yield f"term {job.term}, restarts {job.incidents.restarts_used} of {job.settings.restarts_max}"
    if job.incidents.current:
        yield f"incident {job.incidents.current.number} open: {job.incidents.current.cause}"
