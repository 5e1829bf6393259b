"""One run of a collective: how it ends."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from holdfast.worker.collectives.guarded import Guarded
from holdfast.worker.collectives.repeatable_work import Attempt

DEADLINE_S = 20.0


class Work:
    """As gloo's of a reduce-scatter if it has no future."""

    def __init__(self, error: Exception | None, has_future: bool) -> None:
        self.error, self._has_future = error, has_future

    def get_future(self) -> torch.futures.Future[Any]:
        if not self._has_future:
            raise RuntimeError("no future")
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self.error is None:
            future.set_result([torch.ones(2)])
        else:
            future.set_exception(self.error)
        return future

    def is_completed(self) -> bool:
        return self._has_future

    def wait(self, *_: object) -> bool:
        if self.error is not None:
            raise self.error
        return True


@pytest.mark.parametrize("has_future", [True, False], ids=["future", "thread"])
@pytest.mark.parametrize("error", [None, RuntimeError("Connection closed by peer")], ids=["succeeds", "fails"])
def test_it_ends_and_tells(has_future: bool, error: Exception | None) -> None:
    work: Any = Work(error, has_future)
    attempt = Attempt(Guarded(object()), work, 0)
    told: list[bool] = []
    attempt.tell(lambda: told.append(True))
    assert attempt.has_ended(timedelta(seconds=DEADLINE_S))
    give_up_at = time.monotonic() + DEADLINE_S
    while not told:
        assert time.monotonic() < give_up_at
    assert attempt.has_succeeded == (error is None)
    assert (attempt.error is None) == (error is None)


def test_one_that_gloo_did_not_begin_has_failed() -> None:
    error = RuntimeError("Connection closed by peer")
    attempt = Attempt(Guarded(object()), None, 0, error)
    assert attempt.has_ended() and not attempt.has_succeeded and attempt.error is error
