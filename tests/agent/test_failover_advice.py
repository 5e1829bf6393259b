"""An agent asks the user's extension about its own workers, and only one that is meant for agents."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from holdfast.core.strategies import FailoverStrategy
from holdfast.errors import UsageError
from holdfast.failover import AgentAdviser
from support.worker_groups import worker_group

EXTENSION = """
import holdfast.failover as failover

class ForAgents(failover.DynamicAgentFailoverExtension):
    def get_user_failover_strategy(self, failure_info):
        assert failure_info.exit_code == -9
        return failover.FailoverStrategy.NODE_FAILOVER

class ForMasters(failover.DynamicFailoverExtension):
    def get_user_failover_strategy(self, failure_info):
        raise AssertionError("not here")
"""


@pytest.mark.parametrize(
    ("name", "advice"),
    [("ForAgents", FailoverStrategy.NODE_FAILOVER), ("ForMasters", FailoverStrategy.NORMAL_FAILOVER)],
)
def test_its_advice_goes_with_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, advice: FailoverStrategy
) -> None:
    (tmp_path / "agents_extension.py").write_text(EXTENSION)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def test() -> None:
        async with worker_group(tmp_path, failover=f"agents_extension::{name}") as job:
            [first, *_] = await job.begin()
            os.kill(first, signal.SIGKILL)
            assert (await job.event("WorkerFailed", view=1)).failure.advice is advice

    asyncio.run(test())


def test_one_that_does_not_load_is_an_error_at_once() -> None:
    with pytest.raises(UsageError):
        AgentAdviser("nowhere::Nobody")
