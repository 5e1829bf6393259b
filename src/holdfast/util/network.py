"""Listening sockets."""

from __future__ import annotations

import socket

from holdfast.errors import UsageError

BACKLOG_CONNECTIONS = 4_096


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an address of this machine."""
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
