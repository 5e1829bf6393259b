"""Reports carry the agent's ids and the newest view; what every worker says is reported once."""

from __future__ import annotations

import pytest

from holdfast.agent.reports import UNSENT_REPORTS_MAX, Reports
from holdfast.core.events import Event, NodeLeft, NumbersReported, SessionInfo, WorkerSucceeded
from holdfast.core.shard_map import ShardMap


class Sent:
    """What was sent, by an agent whose incarnation may change."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.incarnation, self.waiting = "first", 0
        self.reports = Reports("node-0", lambda: self.incarnation, self.events.append, lambda: self.waiting)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def test_ids_and_view_are_added_as_they_are_when_it_is_reported() -> None:
    sent = Sent()
    sent.reports.view = 3
    sent.reports.report(WorkerSucceeded, local_rank=1)
    sent.incarnation = "second"
    sent.reports.report(WorkerSucceeded, view=2, local_rank=0)
    sent.reports.report(NodeLeft)
    assert sent.events == [
        WorkerSucceeded(node_id="node-0", incarnation="first", view=3, local_rank=1),
        WorkerSucceeded(node_id="node-0", incarnation="second", view=2, local_rank=0),
        NodeLeft(node_id="node-0", incarnation="second"),
    ]


def test_a_field_that_the_event_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="Unexpected keyword"):
        Sent().reports.report(NodeLeft, reason="none")


def test_what_all_workers_say_is_reported_once_a_view() -> None:
    sent = Sent()
    for view in (1, 2):
        sent.reports.view = view
        for is_first in (True, False):
            sent.reports.report_started((5, 6), ("a", "b"))
            assert sent.reports.report_joined(SessionInfo()) is is_first
            sent.reports.report_committed(view, 7)
            sent.reports.report_closed(9)
        sent.reports.report_committed(view - 1, 8)  # an older view is no news
    assert sent.kinds() == ["WorkersStarted", "ViewJoined", "StepCommitted", "TrainingClosed"] * 2


def test_a_view_without_work_in_between_makes_commits_news_again() -> None:
    sent = Sent()
    for view in (2, 0, 1):
        sent.reports.view = view
        sent.reports.report_committed(view, 1)
    assert [event.view for event in sent.events if hasattr(event, "view")] == [2, 1]


def test_a_revised_session_is_reported_after_the_view_was_joined_and_only_if_it_changed() -> None:
    sent = Sent()
    sent.reports.view = 1
    sent.reports.report_revised(SessionInfo(shard_map=ShardMap(2)))
    sent.reports.report_joined(SessionInfo())
    for shards in (1, 2, 2):
        sent.reports.report_revised(SessionInfo(shard_map=ShardMap(shards)))
    assert sent.kinds() == ["ViewJoined", "SessionRevised"]


def test_optional_reports_are_dropped_while_very_many_wait() -> None:
    sent = Sent()
    for sent.waiting in (UNSENT_REPORTS_MAX, UNSENT_REPORTS_MAX + 1):
        sent.reports.report_optional(NumbersReported, rank=0, step=1, what="loss", outcome="skipped")
    assert sent.kinds() == ["NumbersReported"]
