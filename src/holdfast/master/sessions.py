"""The master's connections: who is on the line, what is waiting to be sent to them, when they were last heard."""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.wire.channel import ServerConnection
from holdfast.wire.messages import FromMaster

OUTBOX_MESSAGES_MAX = 10_000
"""An agent that reads none of this many messages is as good as gone; its connection is ended."""


class Session:
    """One connected agent or watcher, with its own outbox, so that a slow one holds up nobody."""

    def __init__(self, connection: ServerConnection, node_id: str, incarnation: str, now: float) -> None:
        self.connection = connection
        self.node_id = node_id
        self.incarnation = incarnation
        self.heard_at = now
        self.introduced = False
        """Whether the core has taken its first words in."""
        self._outbox: asyncio.Queue[FromMaster | None] = asyncio.Queue(OUTBOX_MESSAGES_MAX)

    def send(self, message: FromMaster) -> None:
        """Queue a message; an overfull queue ends the connection."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.end()

    def finish(self) -> None:
        """End the connection after what is queued."""
        with contextlib.suppress(asyncio.QueueFull):
            self._outbox.put_nowait(None)

    def end(self) -> None:
        """End the connection after nothing more."""
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._outbox.put_nowait(None)

    async def drain_outbox(self) -> None:
        """Send until told to end. Runs beside the reader."""
        while (message := await self._outbox.get()) is not None:
            await self.connection.send(message)


class Switchboard:
    """All agents' sessions, by incarnation: two lives of a node never share a line."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """A new connection of a life takes the place of its old one."""
        if old := self._sessions.get(session.incarnation):
            old.end()
        self._sessions[session.incarnation] = session

    def remove(self, session: Session) -> bool:
        """Whether this was the life's current connection."""
        if self._sessions.get(session.incarnation) is not session:
            return False
        del self._sessions[session.incarnation]
        return True

    def send(self, incarnation: str, message: FromMaster) -> None:
        """To whoever is on the line; an agent that is not will be told its standing order when it comes back."""
        if session := self._sessions.get(incarnation):
            session.send(message)

    def end_all(self) -> None:
        """See everyone off."""
        for session in list(self._sessions.values()):
            session.finish()

    def forget_introductions(self, now: float) -> None:
        """End the connections of those who introduced themselves: they come back and do it again."""
        for session in self._sessions.values():
            session.heard_at = now
            if session.introduced:
                session.finish()

    def silent_since(self, heard_before: float) -> list[Session]:
        """Sessions from which nothing came since then."""
        return [s for s in self._sessions.values() if s.heard_at <= heard_before]

    def quietest_at(self) -> float | None:
        """When the session that has been silent for longest was last heard."""
        return min((s.heard_at for s in self._sessions.values()), default=None)
