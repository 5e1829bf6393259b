"""`holdfast stacks` in the master: passes the request on to the agents, and their answers to the operator.

Nothing of it is a decision, so nothing is journaled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.errors import WireError
from holdfast.master.connections import AgentConnectionState, MasterConnection
from holdfast.wire.control_messages import NodeStacks, OperatorAnswer, ReadStacks

ANSWER_LIMIT_S = 10.0
"""How long agents may take. One reads its workers' stacks in three seconds at most."""
REQUESTS_MAX = 8
"""Requests of operators at the same time."""
NODES_NAMED_MAX = 10


class StackRequests:
    """The requests under way, and the agents that have not answered."""

    def __init__(self) -> None:
        self._last_number = 0
        self._reports: dict[int, asyncio.Queue[NodeStacks]] = {}

    def answered(self, report: NodeStacks) -> None:
        """Accept an agent's answer. One that comes too late is dropped."""
        if reports := self._reports.get(report.request):
            reports.put_nowait(report)

    async def serve(self, operator: MasterConnection, agents: Sequence[AgentConnectionState], refusal: str) -> None:
        """Ask the agents, send each answer to the operator as it comes, and a last sentence."""
        if refusal or len(self._reports) >= REQUESTS_MAX:
            text = refusal or f"{REQUESTS_MAX} requests for stacks are under way: try again in a moment"
            operator.send(OperatorAnswer(False, text))
            operator.finish()
            return
        self._last_number += 1
        number = self._last_number
        self._reports[number] = asyncio.Queue()
        try:
            silent = await self._collect(number, operator, agents)
        finally:
            del self._reports[number]
        operator.send(OperatorAnswer(not silent, _sentence(len(agents), sorted(silent))))
        operator.finish()

    async def _collect(
        self, number: int, operator: MasterConnection, agents: Sequence[AgentConnectionState]
    ) -> set[str]:
        """Return the nodes that have not answered in time."""
        waiting = {agent.node_id for agent in agents}
        for agent in agents:
            agent.connection.send(ReadStacks(number))
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                while waiting:
                    report = await self._reports[number].get()
                    if report.node_id in waiting:
                        waiting.remove(report.node_id)
                        operator.send(report)
                        await operator.drain()
        except (TimeoutError, WireError):
            pass
        return waiting


def _sentence(asked: int, silent: Sequence[str]) -> str:
    if not asked:
        return "no node is connected to the master"
    if not silent:
        return ""
    more = f" and {len(silent) - NODES_NAMED_MAX} more" if len(silent) > NODES_NAMED_MAX else ""
    names = ", ".join(silent[:NODES_NAMED_MAX])
    return f"{len(silent)} of {asked} nodes have not answered in {ANSWER_LIMIT_S:.0f} s: {names}{more}"
