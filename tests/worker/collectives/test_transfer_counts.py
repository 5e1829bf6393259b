"""Counting messages."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.worker.collectives.transfer_counts import TransferCounts


class Transfer:
    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def exception(self) -> BaseException | None:
        try:
            self.future.value()
        except RuntimeError as error:
            return error
        return None


def test_a_message_is_sent_when_it_begins_and_received_when_it_has_come() -> None:
    counts = TransferCounts()
    transfers: list[Any] = [Transfer() for _ in range(3)]
    counts.add("send", 1, transfers[0])
    counts.add("recv", 1, transfers[1])
    counts.add("recv", 2, transfers[2])
    assert counts.are_under_way() and (counts.sent, counts.received) == ({"1": 1}, {})
    transfers[1].future.set_result([])
    transfers[0].future.set_result([])
    assert counts.are_under_way() and (counts.sent, counts.received) == ({"1": 1}, {"1": 1})
    transfers[2].future.set_result([])
    assert not counts.are_under_way() and counts.received == {"1": 1, "2": 1}


def test_one_that_failed_may_have_been_lost() -> None:
    counts = TransferCounts()
    transfer: Any = Transfer()
    counts.add("send", 0, transfer)
    transfer.future.set_exception(RuntimeError("Connection closed by peer"))
    assert counts.are_under_way()
