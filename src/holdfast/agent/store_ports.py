"""Ports for the rendezvous stores of views to come.

A port is bound and listened on here, without torch, and offered to the master ahead of time. When a view takes
it up, the socket goes to the store keeper; clients that were faster wait in its backlog meanwhile. So the store
of a view costs the recovery no round trip, and each view has its own.
"""

from __future__ import annotations

import socket

from holdfast.errors import UsageError

BACKLOG_CONNECTIONS = 4_096


class StorePorts:
    """One port on offer at a time, and those that views have taken up but whose stores are not open yet."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._offered: socket.socket | None = None
        self._promised: dict[int, socket.socket] = {}

    def offer(self) -> int:
        """A port of ours that no view has taken up."""
        if self._offered is None:
            self._offered = listen(self.address)
        return int(self._offered.getsockname()[1])

    def promise(self, view: int, port: int) -> bool:
        """A view has taken the port up, whether or not this agent will get round to that view: another one must be
        offered. False if nothing changed, as the news is old."""
        if self._offered is None or self._offered.getsockname()[1] != port:
            return False
        self._promised[view], self._offered = self._offered, None
        return True

    def take(self, view: int) -> socket.socket | None:
        """The socket of a view's store. Those promised to views before it will not be needed."""
        listener = self._promised.pop(view, None)
        for earlier in [number for number in self._promised if number < view]:
            self._promised.pop(earlier).close()
        return listener

    def close(self) -> None:
        """Give all of them up."""
        for listener in [self._offered, *self._promised.values()]:
            if listener is not None:
                listener.close()
        self._offered = None
        self._promised.clear()


def listen(address: str) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(target)
    except OSError as error:
        raise UsageError(
            f"this node cannot listen on {address}: {error.strerror}; give one of its own addresses as --local-addr"
        ) from error
    listener.listen(BACKLOG_CONNECTIONS)
    return listener
