"""The simulator's driver and a master make the same of the same events.

A real job runs, with workers that are killed. Its journal has the records; what a master took in is told again from
those that state a fact (a node joined, a worker failed), and given to the simulator's driver at the same moments. What
the policy concludes from it must be what the journal has, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.evolve import evolve
from holdfast.core.policy import conclude
from holdfast.core.state import JobState
from holdfast.core.strategies import Strategy
from holdfast.sim.core_driver import CoreDriver
from support.sessions import Run
from support.world import World

TOLD = (r.DurabilityChanged, r.StepsAudited, r.DataAnnouncedRecord, r.CheckpointPublishedRecord)
"""What follows from reports that the journal does not keep (images, samples): applied as it stands, not compared."""


def event_of(record: r.Record, job: JobState, ports: dict[str, int]) -> e.Event | None:
    """The event that made this record; None if it was concluded."""
    if isinstance(record, r.NodeJoined):
        settings = job.created_settings
        return e.Hello(
            node_id=record.node_id,
            incarnation=record.incarnation,
            info=record.info,
            spec=e.JobSpec(
                run_id=job.job_id,
                nodes_min=settings.nodes_min,
                nodes_max=settings.nodes_max,
                restarts_max=settings.restarts_max,
            ),
            store_port=ports.pop(record.node_id, 0),
            reputation=record.reputation,
        )
    node_id = record.failure.node_id if isinstance(record, r.WorkerFailedRecord) else getattr(record, "node_id", "")
    who: dict[str, Any] = {
        "node_id": node_id,
        "incarnation": job.nodes[node_id].incarnation if node_id in job.nodes else "",
    }
    match record:
        case r.WorkersStartedRecord(view=view, pids=pids, logs=logs):
            return e.WorkersStarted(**who, view=view, pids=pids, logs=logs)
        case r.WorkerFailedRecord(failure=failure):
            return e.WorkerFailed(**who, view=failure.view, failure=failure)
        case r.WorkerSucceededRecord(view=view, local_rank=local_rank):
            return e.WorkerSucceeded(**who, view=view, local_rank=local_rank)
        case r.ViewJoinedRecord(view=view, session=session):
            return e.ViewJoined(**who, view=view, session=session)
        case r.SessionRevisedRecord(view=view, session=session):
            return e.SessionRevised(**who, view=view, session=session)
        case r.StepInterruptedRecord(view=view, step_error=step_error):
            return e.StepInterrupted(**who, view=view, step_error=step_error)
        case r.StepCommittedRecord(view=view, step=step):
            return e.StepCommitted(**who, view=view, step=step)
        case r.TrainingClosedRecord(view=view, step=step):
            return e.TrainingClosed(**who, view=view, step=step)
        case r.CountersReadRecord(view=view, readings=readings):
            return e.CountersRead(**who, view=view, readings=readings)
        case r.NodeDraining(signal=signal, why=why):
            return e.NodeLeaving(**who, signal=signal, why=why)
        case r.NodeLeftRecord():
            return e.NodeLeft(**who)
        case _:
            return None


def stores(records: Sequence[r.Record]) -> Iterator[tuple[str, int]]:
    """Who offered the store of each view, and at which port."""
    for record in records:
        if isinstance(record, r.ViewFormed):
            yield record.view.store_node_id, record.view.store_port


def replayed(records: Sequence[r.Record]) -> list[r.Record]:
    """What the driver makes of the facts in a journal."""
    created = records[0]
    assert isinstance(created, r.JobCreated)
    driver = CoreDriver(created.job_id, created.settings, created.at)
    made: list[r.Record] = list(driver.began)
    offers = list(stores(records))
    ports = dict(reversed(offers[:1]))
    for at, turn in groupby(records[len(made) :], key=lambda record: record.at):
        facts = list(turn)
        for record in facts:
            if isinstance(record, TOLD):
                evolve(driver.job, record)
        events = [found for record in facts if (found := event_of(record, driver.job, ports))]
        made += [record for record in driver.take(events, at) if r.is_durable(record)]
        if any(isinstance(record, r.ViewFormed) for record in facts):
            offers.pop(0)
            if offers:  # whose store is taken makes the next one
                node_id, port = offers[0]
                driver.take(
                    [e.StoreOffered(node_id=node_id, incarnation=driver.job.nodes[node_id].incarnation, port=port)],
                    at,
                )
    assert conclude(driver.job, records[-1].at) is None
    return made


@pytest.mark.usefixtures("leak_guard")
def test_a_real_job_s_journal_through_the_simulator_s_driver_is_the_same_journal(tmp_path: Path) -> None:
    run = Run(tmp_path).start("ddp", ranks=2, faults=["forward:5:1:kill", "forward:9:0:kill"]).finish()
    records = [record for record in run.place.journal.records() if not isinstance(record, TOLD)]
    whole = run.place.journal.records()
    assert len(run.incidents) == 2 and any(isinstance(record, r.JobFinished) for record in records)
    assert replayed(whole) == records


@pytest.mark.parametrize("change", ["reason", "strategy"])
def test_another_decision_would_be_noticed(tmp_path: Path, change: str) -> None:
    """A check that cannot fail is none."""
    world = World(nodes=(1, 1), session=e.SessionInfo(), workers=2).train("a")
    world.now += 1.0
    world.do(world.failed("a", 1))
    world.now += 1.0
    world.prove()
    records = [record for record in world.history if r.is_durable(record)]
    assert replayed(records) == records
    others: dict[str, dict[str, Any]] = {"reason": {"why": "?"}, "strategy": {"strategy": Strategy.RETRY}}
    changed = [replace(one, **others[change]) if isinstance(one, r.IncidentDecided) else one for one in records]
    assert replayed(changed) != changed
