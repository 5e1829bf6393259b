"""Questions, and what follows from the runs."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest

from holdfast.sim.answers import Inquiry, Question, estimate, optimal_interval_s
from holdfast.sim.charts import html, svg
from holdfast.sim.fault_models import FaultModel
from holdfast.sim.outages import DAY_S, HOUR_S
from holdfast.sim.parallel_runs import RunTask, run_all
from holdfast.sim.scenario import RecoveryPlan, Scenario

FLEET = Scenario(
    nodes=16,
    days=4.0,
    model=FaultModel(per_node_day=0.2, repair_median_s=2 * HOUR_S, repair_mean_s=4 * HOUR_S),
)


def test_a_mean_has_its_interval() -> None:
    found = estimate([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2) and found.plus_minus == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert estimate([0.5]).plus_minus == 0.0


def test_all_questions_are_answered_from_runs_that_are_made_once() -> None:
    inquiry = Inquiry(FLEET, list(Question), seeds=2, target=0.9)
    keys = [(msgspec.msgpack.encode(task.scenario), task.seed) for task in inquiry.tasks]
    assert len(keys) == len(set(keys))
    runs = run_all(inquiry.tasks, processes=1)
    by_question = {answer.question: answer for answer in inquiry.answers(runs)}
    assert set(by_question) == set(Question)
    sweep = by_question[Question.SPARES].outcomes
    assert [one.nodes - one.spares for one in sweep] == [16] * len(sweep), "the job stays as large: spares are bought"
    assert sweep[-1].job_rate.mean > sweep[0].job_rate.mean
    assert all(one.goodput.mean <= one.bound.mean for answer in by_question.values() for one in answer.outcomes)
    plans = {one.label: one.goodput.mean for one in by_question[Question.STRATEGY].outcomes}
    assert plans[RecoveryPlan.RECOVER] > plans[RecoveryPlan.RESTART_ELASTIC] > plans[RecoveryPlan.RESTART]
    assert "recover pays most" in by_question[Question.STRATEGY].sentence
    assert "90 % takes" in by_question[Question.NINES].sentence
    answers = list(by_question.values())
    picture = ElementTree.fromstring(svg(answers, inquiry.first_run(runs)))
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert "Spares: what the job gains, and what they cost" in texts and texts.count("spare machines") == 1
    assert "<script" not in (page := html(answers, runs[0], "holdfast sim <x>")) and "&lt;x&gt;" in page


def test_the_cadence_is_tried_around_the_optimum() -> None:
    """Of a fault each 7.5 hours and a stall of half a second: sqrt(2 * 0.5 * 27,000)."""
    assert optimal_interval_s(FLEET) == pytest.approx(math.sqrt(DAY_S / 3.2))
    restart = msgspec.structs.replace(FLEET, plan=RecoveryPlan.RESTART_ELASTIC)
    inquiry = Inquiry(restart, [Question.CADENCE], seeds=1, target=0.9)
    assert len(inquiry.tasks) == 5 and len({task.scenario.checkpoint_every_s for task in inquiry.tasks}) == 5


def test_processes_make_the_same_runs() -> None:
    tasks = [RunTask(FLEET, seed) for seed in range(3)]
    shares: list[float] = []
    alone, together = run_all(tasks, processes=1), run_all(tasks, processes=2, on_share=shares.append)
    quiet = [[msgspec.structs.replace(run, processor_s=0.0) for run in runs] for runs in (alone, together)]
    assert quiet[0] == quiet[1] and [run.seed for run in together] == [0, 1, 2]
    assert shares[-1] == 1.0 and shares == sorted(shares)
