"""What an online soak must show at its end, and its diary.

every agent ended with 0, the journal replays into a job that succeeded, its invariants hold, no incident is open
every step was committed, in one view, by every rank of that view, and was never tried again in a later one
the samples of each step are those of the undisturbed run, each once
same world: every loss and the state at the end are bit-identical; any world: equal but for the order of additions
no process, no directory of a socket, no shared memory is left
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ledger import Ledger, Try
from processes import marked_pids

from holdfast.core.invariants import check_all
from holdfast.core.records import IncidentClosed, IncidentDecided, IncidentOpened, Outcome
from holdfast.core.state import Finished
from holdfast.journal import read_entries

if TYPE_CHECKING:
    from hurting import Hurting
    from online import Campaign

END_TIMEOUT_S = 10.0
CLOSE_ENOUGH = 1e-6
"""In double precision another order of additions is far below this, and a sample lost or used twice far above."""
SHOWN_MAX = 5


# --- what is left behind


def shared_memory() -> set[str]:
    """By name, but for directories: they are agents' snapshots, ours (`Run.snapshots`) or another run's."""
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


def left_behind(campaign: Campaign, shared_before: set[str]) -> list[str]:
    problems = []
    give_up_at = time.monotonic() + END_TIMEOUT_S
    while pids := marked_pids({"BENCH_RUN": campaign.run.mark}):
        if time.monotonic() > give_up_at:
            problems.append(f"processes are left: {[(pid, _command(pid)) for pid in pids]}")
            break
        time.sleep(0.05)
    directories = list((campaign.directory / "tmp").glob("holdfast-*"))
    if len(directories) > campaign.agents_killed:  # one that was killed could not remove its own
        problems.append(f"directories are left: {directories}")
    ours = {path.name for path in (campaign.work / "ears").iterdir()}
    new = [name for name in shared_memory() - shared_before if "holdfast" in name or ours & set(name.split("_"))]
    new += [str(path) for path in campaign.run.snapshots.rglob("image-*") if not campaign.agents_killed]
    return [*problems, f"shared memory is left: {new}"] if new else problems


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


# --- against the undisturbed run


def compare(campaign: Campaign, reference: Ledger, directory: Path) -> list[str]:
    elastic, steps = campaign.options.elastic, campaign.steps
    problems = [*_journal_problems(campaign), *_history_problems(campaign.ledger, steps, campaign.ranks, elastic)]
    problems += _history_problems(reference, steps, campaign.ranks, False)
    if problems:
        return problems
    hurt_steps, calm_steps = _committed(campaign.ledger), _committed(reference)
    different = [step for step in calm_steps if not _same(hurt_steps[step], calm_steps[step], elastic)]
    if different:
        problems.append(f"{len(different)} steps differ in losses or samples: {_few(different)}")
    mine, theirs = _finals(campaign.work), _finals(directory / "reference" / "work")
    if not _same_finals(mine, theirs, elastic):
        problems.append(f"the state at the end differs in ranks {_few(sorted(set(mine) | set(theirs)))}")
    return problems


def _journal_problems(campaign: Campaign) -> list[str]:
    job = campaign.job()
    check_all(job)
    entries = _records(campaign)
    opened = {record.number for record in entries if isinstance(record, IncidentOpened)}
    closed = {record.number for record in entries if isinstance(record, IncidentClosed)}
    problems = [f"incidents stayed open: {_few(sorted(opened - closed))}"] if opened - closed else []
    if not isinstance(job.phase, Finished) or job.phase.record.outcome is not Outcome.SUCCEEDED:
        problems.append(f"the job did not succeed: {job.phase}")
    ended = [record for record in entries if isinstance(record, IncidentClosed)]
    if late := [incident.cause for incident in ended if _is_unprovoked(campaign, incident)]:
        problems.append(f"{len(late)} incidents when nobody hurt the job any more: {_few(late)}")
    if job.incidents.restarts_used:
        problems.append(f"{job.incidents.restarts_used} restarts were used")
    return problems


def _is_unprovoked(campaign: Campaign, incident: IncidentClosed) -> bool:
    return incident.happened_at > campaign.calm_since and incident.kind != "planned"


def _history_problems(ledger: Ledger, steps: int, ranks: int, elastic: bool) -> Iterator[str]:
    """One history: each step committed once, by all, and not tried again."""
    views = ledger.committed_views()
    if missing := [step for step in range(steps) if step not in views]:
        yield f"{len(missing)} steps were never said to be committed: {_few(missing)}"
    if twice := [step for step, found in views.items() if len(found) > 1]:
        yield f"{len(twice)} steps were committed in several views: {_few(twice)}"
    for step in sorted(set(views) & set(ledger.tries)):
        view = min(views[step])
        tried = ledger.tries[step][view]
        world = next(iter(tried.values())).world if tried else 0
        if len(tried) != world or (world != ranks and not elastic):
            yield f"step {step} was committed in view {view} by ranks {sorted(tried)} of a world of {world}"
        if later := [number for number in ledger.tries[step] if number > view]:
            yield f"step {step} was committed in view {view} and tried again in views {later}"


def _committed(ledger: Ledger) -> dict[int, dict[int, Try]]:
    return {step: ledger.tries[step][min(views)] for step, views in ledger.committed_views().items()}


def _same(mine: dict[int, Try], theirs: dict[int, Try], elastic: bool) -> bool:
    if not elastic:
        return all(mine[rank][2:] == theirs[rank][2:] for rank in theirs)
    samples = [sorted(number for one in step.values() for number in one.samples) for step in (mine, theirs)]
    return samples[0] == samples[1] and abs(_mean(mine) - _mean(theirs)) < CLOSE_ENOUGH


def _mean(step: dict[int, Try]) -> float:
    count = sum(len(one.samples) for one in step.values())
    return sum(float.fromhex(one.loss) * len(one.samples) for one in step.values()) / count


def _finals(work: Path) -> dict[int, Any]:
    return {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in work.glob("final-*")}


def _same_finals(mine: dict[int, Any], theirs: dict[int, Any], elastic: bool) -> bool:
    if not elastic:
        return mine == theirs
    one, other = mine[0]["parameters"], theirs[0]["parameters"]
    return all(final["digest"] == mine[0]["digest"] for final in mine.values()) and all(
        abs(a - b) < CLOSE_ENOUGH for a, b in zip(one, other, strict=True)
    )


# --- the diary


def print_diary(campaign: Campaign, hurting: Hurting) -> None:
    """Each round's faults, and what answered them."""
    records = _records(campaign)
    decided = [record for record in records if isinstance(record, IncidentDecided)]
    closed = {record.number: record for record in records if isinstance(record, IncidentClosed)}
    begun = {fault.round: fault.at for fault in reversed(hurting.diary)}
    start = min(begun.values(), default=0.0)
    for number in sorted(begun):
        until = begun.get(number + 1, float("inf"))
        faults = [fault for fault in hurting.diary if fault.round == number]
        print(f"{begun[number] - start:7.2f} s  " + "; ".join(_moment(fault, begun[number]) for fault in faults))
        print_answers([one for one in decided if begun[number] <= one.at < min(until, campaign.calm_since)], closed)
    if after := [one for one in decided if one.at >= campaign.calm_since]:
        print(f"{campaign.calm_since - start:7.2f} s  nothing any more")
        print_answers(after, closed)
    print()
    print_times(campaign, hurting, list(closed.values()))


def print_answers(decided: list[IncidentDecided], closed: dict[int, IncidentClosed]) -> None:
    for answer in decided:
        receipt = closed.get(answer.number)
        took = f"over after {(receipt.at - receipt.happened_at) * 1e3:.0f} ms" if receipt else "STILL OPEN"
        print(f"             incident {answer.number}: {answer.strategy}, {took}: {answer.cause[:110]}")


def _moment(fault: Any, begun_at: float) -> str:
    return f"+{(fault.at - begun_at) * 1e3:.0f} ms {fault.what}"


def print_times(campaign: Campaign, hurting: Hurting, closed: list[IncidentClosed]) -> None:
    took_ms: dict[str, list[float]] = defaultdict(list)
    for record in closed:
        took_ms[record.strategy].append((record.at - record.happened_at) * 1e3)
    for strategy, times in sorted(took_ms.items()):
        print(f"{strategy:18} {len(times):4d} incidents, median {median(times):6.0f} ms, max {max(times):6.0f} ms")
    job = campaign.job()
    last = max((line.step for line in campaign.ledger.done), default=-1)
    views = job.view.number if job.view else 0
    print(f"{hurting.rounds} rounds, {len(hurting.diary)} faults, {views} views, {job.term} terms, step {last} reached")


def _records(campaign: Campaign) -> list[Any]:
    path = campaign.directory / "jobs" / "online" / "journal.sqlite"
    return [entry.record for entry in read_entries(path)] if path.exists() else []


def _few(things: list[Any]) -> str:
    more = f" and {len(things) - SHOWN_MAX} more" if len(things) > SHOWN_MAX else ""
    return ", ".join(map(str, things[:SHOWN_MAX])) + more
