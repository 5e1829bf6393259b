"""How many messages this member of a group has sent to each other one and received: a break may have lost one."""

from __future__ import annotations

from holdfast.worker.collectives.guarded import GuardedTransfer


class TransferCounts:
    """The sends and receives of one group on this rank, by peer. Not for several threads at once."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str, GuardedTransfer]] = []
        self.sent: dict[str, int] = {}
        """How many sends to each have begun."""
        self.received: dict[str, int] = {}
        """How many from each have come."""

    def add(self, name: str, peer: int, work: GuardedTransfer) -> None:
        """Count a `send` or a `recv` that has begun."""
        self._look()
        if name == "send":
            self.sent[str(peer)] = self.sent.get(str(peer), 0) + 1
        self._open.append((name, str(peer), work))

    def are_under_way(self) -> bool:
        """Return whether one has not ended, or has failed."""
        self._look()
        return bool(self._open)

    def _look(self) -> None:
        left = []
        for name, peer, work in self._open:
            if not work.get_future().done() or work.exception() is not None:
                left.append((name, peer, work))
            elif name == "recv":
                self.received[peer] = self.received.get(peer, 0) + 1
        self._open = left
