"""The master's front door: looks at the first bytes of every connection before gRPC sees it.

gRPC turns away what is not HTTP/2, but tells nobody. Here a stranger's bytes get an answer and a line in the log,
and a connection that says nothing is not kept for ever. What begins like HTTP/2, or like TLS where the job uses
it, is passed through unchanged to gRPC, which listens on a socket of this machine's only (and asks for the same
proof of the token whoever connects).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TLS_HANDSHAKE = b"\x16\x03"
PROOF_TIMEOUT_S = 20.0
"""From the connection to the proof of the token: a busy master has all of a thousand agents at once."""
BUFFER_BYTES_MAX = 1024 * 1024
BACKLOG_CONNECTIONS = 4_096
ANSWER = b"holdfast: this port is for agents of a Holdfast job; what you sent is not their protocol\n"

Stranger = Callable[[str, str], None]


class Gate:
    """Listens on the public address and relays to the private one."""

    def __init__(self, inner_path: str, *, tls: bool, stranger: Stranger) -> None:
        self._inner_path, self._stranger = inner_path, stranger
        self._opening = TLS_HANDSHAKE if tls else HTTP2_PREFACE
        self._listener: asyncio.Server | None = None
        self._guests: set[_Guest] = set()
        self._by_name: dict[str, _Guest] = {}
        self._closed = False

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. OSError if the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._guest, host, port, backlog=BACKLOG_CONNECTIONS)
        return int(self._listener.sockets[0].getsockname()[1])

    def _guest(self) -> _Guest:
        guest = _Guest(self._inner_path, self._opening, self._stranger, self._came, self._gone)
        self._guests.add(guest)
        return guest

    def _came(self, guest: _Guest) -> None:
        self._by_name[guest.peer] = guest
        if self._closed:  # it was accepted before the door closed, and comes in only now
            guest.leave()

    def heard(self, peer: str) -> None:
        """gRPC has heard a call of this guest: what is wrong with it, the channel will say."""
        for guest in self._named(peer):
            guest.has_called = True

    def trust(self, peer: str) -> None:
        """This guest has proved itself and may stay."""
        for guest in self._named(peer):
            guest.be_patient()

    def _named(self, peer: str) -> list[_Guest]:
        guest = self._by_name.get(peer)
        return [guest] if guest else []

    def _gone(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        if self._by_name.get(guest.peer) is guest:
            del self._by_name[guest.peer]
        if guest.admitted and not guest.has_called and not self._closed:
            self._stranger(guest.peer, "it left before it called: a certificate that does not fit, or no agent at all")

    def close_door(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()

    def stop(self) -> None:
        """Close the door, and show everyone out."""
        self.close_door()
        for guest in list(self._guests):
            guest.leave()


class _Half(asyncio.Protocol):
    """One side of a relayed connection: what it reads, the other side writes."""

    transport: asyncio.Transport | None = None
    other: _Half | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(BUFFER_BYTES_MAX)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _Guest(_Half):
    """The public side. Says nothing to gRPC until the opening is right."""

    def __init__(
        self,
        inner_path: str,
        opening: bytes,
        stranger: Stranger,
        came: Callable[[_Guest], None],
        gone: Callable[[_Guest], None],
    ) -> None:
        self._inner_path, self._opening, self._stranger = inner_path, opening, stranger
        self._came, self._gone = came, gone
        self._heard = b""
        self._admission: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self.peer = "unknown"
        self.has_called = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        address = transport.get_extra_info("peername") or ("unknown", 0)
        self.peer = f"{address[0]}:{address[1]}"
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(PROOF_TIMEOUT_S, self._turn_away, "it did not prove itself in time")
        self._came(self)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            super().data_received(data)
            return
        self._heard += data
        wanted = self._opening[: len(self._heard)]
        if self._heard[: len(wanted)] != wanted:
            self._turn_away(f"its first bytes are not our protocol: {self._heard[:24]!r}")
        elif len(self._heard) >= len(self._opening) and self._admission is None:
            assert self.transport is not None
            self.transport.pause_reading()
            self._admission = asyncio.create_task(self._admit())

    async def _admit(self) -> None:
        """Connect to gRPC under a name that tells it who the guest is."""
        loop = asyncio.get_running_loop()
        private = None
        try:
            private = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            private.bind(f"\0holdfast/{self.peer}/{os.getpid()}-{private.fileno()}")
            await loop.sock_connect(private, self._inner_path)
            _, inner = await loop.create_connection(_Half, sock=private)
        except OSError as error:
            self._stranger(self.peer, f"it could not be let in: {error.strerror}")
            if private is not None:
                private.close()
            self.leave()
            return
        inner.other, self.other = self, inner
        assert self.transport is not None and inner.transport is not None
        inner.transport.write(self._heard)
        self._heard = b""
        if self.transport.is_closing():
            inner.transport.close()
        else:
            self.transport.resume_reading()

    def be_patient(self) -> None:
        """Let it stay for as long as it likes."""
        if self._patience is not None:
            self._patience.cancel()

    @property
    def admitted(self) -> bool:
        """Whether it was passed on to gRPC."""
        return self.other is not None

    def _turn_away(self, why: str) -> None:
        self._stranger(self.peer, why)
        self.has_called = True  # one line a stranger
        if self.transport is not None and not self.admitted:
            self.transport.write(ANSWER)
        self.leave()

    def leave(self) -> None:
        """End this connection."""
        if self.transport is not None:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(error)
        self._gone(self)


def guest_name(peer: str) -> str:
    """The guest's address, from the name under which the gate introduced it to gRPC."""
    _, mark, rest = peer.partition("holdfast/")
    return rest.rpartition("/")[0] if mark else peer
