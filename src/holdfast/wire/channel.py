"""Connections between agents (or watchers) and the master: one gRPC stream each, authenticated, sealed.

gRPC is imported here only. There is one method, a bidirectional stream of opaque frames; what is in them is
secure.py's and messages.py's business. Each connection has its own TCP connection, so that a broken one says
something about its own peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a connection that ends is our news to tell, not gRPC's

import grpc
import grpc.aio
import msgspec

from holdfast.errors import AuthenticationError, WireError
from holdfast.wire.gate import Gate, Stranger, guest_name
from holdfast.wire.messages import FromMaster, ToMaster
from holdfast.wire.secure import (
    PROTOCOL_VERSION,
    Challenge,
    Opening,
    Response,
    Role,
    Seal,
    check_opening,
    check_proof,
    derive,
    new_nonce,
)
from holdfast.wire.tls import Tls as Tls

METHOD = "/holdfast.Control/Connect"
PAGE_FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Of what a master sends: a page with one record, the view of ten thousand nodes, is a few megabytes."""
REPORT_FRAME_BYTES_MAX = 1024 * 1024
"""Of what it takes: a failure with its traceback and log tail is some tens of kilobytes."""
HANDSHAKE_TIMEOUT_S = 10.0

_OPTIONS = [
    ("grpc.max_send_message_length", PAGE_FRAME_BYTES_MAX),
    ("grpc.http2.bdp_probe", 0),  # a ping for every few messages, to tune windows that ours never fill
]
_CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", PAGE_FRAME_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # For watchers, who have nothing to say: a master whose machine lost power is noticed all the same.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", REPORT_FRAME_BYTES_MAX),  # strangers' frames come in before they are judged
    ("grpc.max_concurrent_streams", 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]

# Made once: a decoder of such unions takes a while to make, and a thousand agents may connect at once.
_encoder = msgspec.msgpack.Encoder()
_to_master: msgspec.msgpack.Decoder[ToMaster] = msgspec.msgpack.Decoder(ToMaster)
_from_master: msgspec.msgpack.Decoder[FromMaster] = msgspec.msgpack.Decoder(FromMaster)
_opening = msgspec.msgpack.Decoder(Opening)
_challenge = msgspec.msgpack.Decoder(Challenge)
_response = msgspec.msgpack.Decoder(Response)
T = TypeVar("T")


class ClientConnection:
    """An agent's or watcher's side."""

    def __init__(self, channel: Any, stream: Any, seal: Seal, opener: Seal) -> None:
        self._channel, self._stream, self._seal, self._opener = channel, stream, seal, opener

    async def send(self, message: ToMaster) -> None:
        """Send one message; raises WireError if the connection is gone."""
        await _write(self._stream, self._seal.close(_encoder.encode(message)))

    async def receive(self) -> FromMaster:
        """The next message; raises WireError if the connection is gone."""
        frame = await _read(self._stream)
        return _decode(_from_master, self._opener.open(frame))

    async def close(self) -> None:
        """End the connection."""
        self._stream.cancel()
        await self._channel.close()


async def connect(
    host: str, port: int, *, token: str, role: Role, tls: Tls | None, timeout_s: float
) -> ClientConnection:
    """Connect and authenticate, both ways. Raises WireError with a sentence if that cannot be done."""
    channel = _channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", tls)
    stream = channel.stream_stream(METHOD)()
    try:
        async with asyncio.timeout(timeout_s):
            seal, opener = await _client_handshake(stream, token, role)
    except TimeoutError:
        await channel.close()
        raise WireError(f"no answer from {host}:{port} in {timeout_s:.1f} s") from None
    except BaseException:
        await channel.close()
        raise
    return ClientConnection(channel, stream, seal, opener)


def _channel(target: str, tls: Tls | None) -> Any:
    if tls is None:
        return grpc.aio.insecure_channel(target, options=_CLIENT_OPTIONS)
    cert, key, ca = tls.read()
    credentials = grpc.ssl_channel_credentials(
        root_certificates=ca or cert, private_key=key if ca else None, certificate_chain=cert if ca else None
    )
    return grpc.aio.secure_channel(target, credentials, options=_CLIENT_OPTIONS)


async def _client_handshake(stream: Any, token: str, role: Role) -> tuple[Seal, Seal]:
    nonce = new_nonce()
    opening = Opening(version=PROTOCOL_VERSION, role=role, nonce=nonce)
    await _write(stream, _encoder.encode(opening))
    challenge = _decode(_challenge, await _read(stream))
    keys = derive(token, nonce, challenge.nonce)
    check_proof(challenge.proof, keys.server_proof, "the master")
    await _write(stream, _encoder.encode(Response(proof=keys.client_proof)))
    return Seal(keys.to_server), Seal(keys.to_client)


@contextlib.contextmanager
def _errors_of_ours() -> Iterator[None]:
    """What gRPC raises, as ours. When the other side resets a call it raises CancelledError, as if asyncio had been
    asked to end the task: only a cancellation that somebody did ask for may pass."""
    try:
        yield
    except (grpc.RpcError, asyncio.InvalidStateError) as error:
        raise _explain(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WireError("the other side reset the connection") from error


async def _write(stream: Any, frame: bytes) -> None:
    with _errors_of_ours():
        await stream.write(frame)


async def _read(stream: Any) -> bytes:
    with _errors_of_ours():
        frame = await stream.read()
    if frame is grpc.aio.EOF:
        code, details = await stream.code(), await stream.details()
        if code == grpc.StatusCode.UNAUTHENTICATED:
            raise AuthenticationError(details or "the other side refused us")
        raise WireError(details or "the other side ended the connection")
    return bytes(frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"a message cannot be read: {error}") from error


def _explain(error: Exception) -> WireError:
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(error.details() or "the other side refused us")
        return WireError((error.details() or str(error.code())).splitlines()[0])
    return WireError(str(error) or "the connection is closed")


class ServerConnection:
    """The master's side of one agent's or watcher's connection."""

    def __init__(self, context: Any, role: Role, peer: str, seal: Seal, opener: Seal) -> None:
        self.role = role
        self.peer = peer
        self._context, self._seal, self._opener = context, seal, opener

    async def send(self, message: FromMaster) -> None:
        """Send one message. Not from two tasks at once: frames are numbered."""
        await self._context.write(self._seal.close(_encoder.encode(message)))

    async def receive(self) -> ToMaster | None:
        """The next message; None when the other side has ended the connection."""
        frame = await self._context.read()
        if frame is grpc.aio.EOF:
            return None
        return _decode(_to_master, self._opener.open(frame))


Handler = Callable[[ServerConnection], Awaitable[None]]


class Server:
    """Listens for agents and watchers. `stranger(peer, why)` hears of everyone who is turned away."""

    def __init__(self, *, token: str, tls: Tls | None, handler: Handler, stranger: Stranger) -> None:
        self._token, self._tls, self._handler, self._stranger = token, tls, handler, stranger
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((_Methods(self._serve, stranger),))
        self._inner_name = f"holdfast-{os.getpid()}-{secrets.token_hex(8)}"
        self._gate = Gate(f"\0{self._inner_name}", tls=tls is not None, stranger=stranger)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises WireError if the address cannot be had."""
        self._bind(f"unix-abstract:{self._inner_name}")  # leaves no file behind, however the master ends
        await self._server.start()
        try:
            return await self._gate.start(host, port)
        except OSError as error:
            await self.stop(0.0)
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise WireError(f"cannot listen on {host}:{port}: {reason}") from error

    def _bind(self, address: str) -> None:
        if self._tls is None:
            self._server.add_insecure_port(address)
            return
        cert, key, ca = self._tls.read()
        credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)
        self._server.add_secure_port(address, credentials)

    async def stop(self, grace_s: float) -> None:
        """End all connections; those that are about to end by themselves have a moment to."""
        self._gate.close_door()
        await self._server.stop(grace=grace_s)
        self._gate.stop()

    async def _serve(self, _requests: Any, context: Any) -> None:
        peer = guest_name(context.peer())
        self._gate.heard(peer)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection = await self._handshake(context, peer)
        except (WireError, TimeoutError) as error:
            why = str(error) or "the handshake was not finished in time"
            self._stranger(peer, why)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        self._gate.trust(peer)
        try:
            await self._handler(connection)
        except WireError as error:
            self._stranger(peer, str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _handshake(self, context: Any, peer: str) -> ServerConnection:
        opening = _decode(_opening, await self._handshake_frame(context))
        check_opening(opening)
        nonce = new_nonce()
        keys = derive(self._token, opening.nonce, nonce)
        await context.write(_encoder.encode(Challenge(nonce=nonce, proof=keys.server_proof)))
        response = _decode(_response, await self._handshake_frame(context))
        check_proof(response.proof, keys.client_proof, f"the {opening.role}")
        return ServerConnection(context, opening.role, peer, Seal(keys.to_client), Seal(keys.to_server))

    async def _handshake_frame(self, context: Any) -> bytes:
        frame = await context.read()
        if frame is grpc.aio.EOF:
            raise WireError("the connection ended during the handshake")
        return bytes(frame)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Our one method; anything else is a stranger's."""

    def __init__(self, serve: Callable[[Any, Any], Awaitable[None]], stranger: Stranger) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(serve)
        self._stranger = stranger

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == METHOD:
            return self._handler
        with contextlib.suppress(Exception):  # a log line must not be a way in
            self._stranger("unknown", f"it called {str(handler_call_details.method)[:100]!r}, which is not ours")
        return None
