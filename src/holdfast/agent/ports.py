"""Ports for the rendezvous stores of views to come.

A port is bound and listened on here, without torch, and offered to the master ahead of time. When a view takes
it up, the socket goes to the store keeper; clients that were faster wait in its backlog meanwhile. So the store
of a view costs the recovery no round trip, and each view has its own.
"""

from __future__ import annotations

import socket

BACKLOG_CONNECTIONS = 4_096


class StorePorts:
    """The sockets on offer: one at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._offered: dict[int, socket.socket] = {}

    def offer(self) -> int:
        """A port of ours that nobody uses yet."""
        if not self._offered:
            listener = _listen(self.address)
            self._offered[listener.getsockname()[1]] = listener
        return next(iter(self._offered))

    def take(self, port: int) -> socket.socket | None:
        """The socket behind an offered port, which is then no longer on offer."""
        return self._offered.pop(port, None)

    def close(self) -> None:
        """Give all of them up."""
        for listener in self._offered.values():
            listener.close()
        self._offered.clear()


def _listen(address: str) -> socket.socket:
    family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.bind(target)
    listener.listen(BACKLOG_CONNECTIONS)
    return listener
