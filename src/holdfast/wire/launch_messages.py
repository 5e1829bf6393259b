"""Frames between processes of one machine: the agent, its fork server, its store host and its workers.

A frame is a header (length of the body, number of file descriptors) and a body (one tagged struct as msgpack).
The descriptors travel beside the bytes (SCM_RIGHTS). On a unix stream they arrive no later than the first byte of
the write they were sent with, in order, but possibly together with the end of an older frame: so the reader queues
them, and the header says how many belong to which frame.

Strings that the system hands out as bytes (arguments, environment, paths) stay bytes: not all of them are UTF-8.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from holdfast.errors import WireError
from holdfast.wire.frames import check_length, decode
from holdfast.wire.worker_messages import FromWorker, ToWorker

# An environment and its arguments cannot exceed 2 MiB where the kernel's own limit is the usual one.
FRAME_BYTES_MAX = 4 * 2**20
FRAME_DESCRIPTORS_MAX = 8
RECEIVE_BYTES = 256 * 2**10

_HEADER = struct.Struct("!IB")
_ANCILLARY_BYTES = socket.CMSG_SPACE(FRAME_DESCRIPTORS_MAX * array.array("i").itemsize)

CALL_VARIABLE = "HOLDFAST_CALL"
"""Names the file with the function that a worker is to call; empty: it is in the worker's memory."""
RESULTS_VARIABLE = "HOLDFAST_CALL_RESULTS"
"""Names the file to which a worker appends what the function returned."""

Mode = Literal["warm", "cold"]
ScriptKind = Literal["script", "module", "path"]


class LaunchWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker needs, however it is run. Descriptors: report pipe, stdout, stderr."""

    request_id: int
    argv: tuple[bytes, ...]
    env: dict[bytes, bytes]
    cwd: bytes
    local_rank: int
    numa_binding: str = ""


class LaunchPython(LaunchWorker, frozen=True, kw_only=True, tag="launch-python"):
    """Run a script, a module (`-m`) or a path (`runpy.run_path`) inside the forked process."""

    kind: ScriptKind


class LaunchExec(LaunchWorker, frozen=True, kw_only=True, tag="launch-exec"):
    """Replace the forked process by a program."""


class CallerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptors that a program passes to the agent it starts (holdfast/torchrun.py), as JSON; -1: none."""

    report: int
    """Where the agent reports the job's end: the writing end of a pipe."""
    caller: int
    """The reading end of a pipe: end of file when the program has ended."""
    call: int = -1
    """The memory file with a function and its arguments."""
    results: int = -1
    """The memory file to which workers append what the function returned."""
    server: int = -1
    """The socket to a fork server that is a fork of the program."""
    server_pid: int = 0


class BecomeStoreHost(msgspec.Struct, frozen=True, tag="become-store-host"):
    """Become the store host. Descriptors: report pipe, control socket, stderr."""

    request_id: int


class PreloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork server is to import. It travels as JSON on its command line."""

    modules: tuple[str, ...] = ()
    """As `--preload` names them."""
    script_kind: ScriptKind = "script"
    script: str = ""
    """Whose imports are done ahead, if `modules` has "auto"; empty: none is known."""
    without: tuple[str, ...] = ()
    """Modules that made an earlier fork server of the job unfit to fork."""


class ForkServerReady(msgspec.Struct, frozen=True, tag="fork-server-ready"):
    """The fork server can fork. A problem is a sentence about something that is slower or impossible because of it."""

    mode: Mode
    preload_s: float
    problems: tuple[str, ...]
    unsafe: dict[str, str] = {}
    """Modules that this process must not have imported, and what each of them did. Forks of it may hang or crash."""
    imported: tuple[str, ...] = ()
    """Packages that were imported because the script does."""
    sets: tuple[str, ...] = ()
    """Variables that the script sets before it imports torch, and that torch has read here already."""
    is_fit: bool = True
    """Whether forks can make up for all of these; if not, the script needs clean interpreters."""


class WorkerLaunched(msgspec.Struct, frozen=True, tag="worker-launched"):
    """The last message of a forked process before it runs what it was forked for."""

    request_id: int
    pid: int


class LaunchFailed(msgspec.Struct, frozen=True, tag="launch-failed"):
    """Nothing was run and nothing will be. `pid` is 0 where no process was made."""

    request_id: int
    pid: int
    reason: str
    is_unfit: bool = False
    """The fork server itself must not fork: it has threads, or a device."""


class OpenStore(msgspec.Struct, frozen=True, tag="open-store"):
    """Serve a rendezvous store. Descriptor: the socket, bound and listening."""

    view: int
    host: str
    port: int


class CloseStore(msgspec.Struct, frozen=True, tag="close-store"):
    view: int


class StoreOpened(msgspec.Struct, frozen=True, tag="store-opened"):
    view: int


class StoreFailed(msgspec.Struct, frozen=True, tag="store-failed"):
    view: int
    reason: str


class StoreClosed(msgspec.Struct, frozen=True, tag="store-closed"):
    """Its port is free again."""

    view: int


ServerRequest = LaunchPython | LaunchExec | BecomeStoreHost
Report = WorkerLaunched | LaunchFailed
StoreHostRequest = OpenStore | CloseStore
StoreHostReply = StoreOpened | StoreFailed | StoreClosed
Message = ServerRequest | ForkServerReady | Report | StoreHostRequest | StoreHostReply | FromWorker | ToWorker

MessageT = TypeVar("MessageT")


def socket_address(name: str) -> str:
    """Where to bind or connect: a name that begins with @ is the kernel's own, no file."""
    return f"\0{name[1:]}" if name.startswith("@") else name


def encode(message: Message, descriptor_count: int = 0) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes exceeds the {FRAME_BYTES_MAX} allowed")
    if descriptor_count > FRAME_DESCRIPTORS_MAX:
        raise WireError(f"{descriptor_count} descriptors exceed the {FRAME_DESCRIPTORS_MAX} a frame may carry")
    return _HEADER.pack(len(body), descriptor_count) + body


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Blocking. Descriptors go with the first byte."""
    frame = memoryview(encode(message, len(descriptors)))
    while frame:
        frame, descriptors = frame[send_part(connection, frame, descriptors) :], ()


def send_part(connection: socket.socket, frame: memoryview, descriptors: Sequence[int]) -> int:
    """One write, which may be partial; the number of bytes it took."""
    if not descriptors:
        return connection.send(frame)
    return socket.send_fds(connection, [frame], list(descriptors))


class FrameReader(Generic[MessageT]):
    """Turns a stream of bytes and descriptors into messages, without trusting either."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decoder = decoder
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def receive(self, connection: socket.socket) -> bool:
        """One read; False when the other side is gone."""
        # Not socket.recv_fds: it drops the flag (CPython 3.11), and with it what keeps descriptors out of exec.
        data, ancillary, flags, _ = connection.recvmsg(RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        for _, _, numbers in ancillary:  # SCM_RIGHTS is all that anybody sends
            self._descriptors.extend(array.array("i", numbers))
        if flags & socket.MSG_CTRUNC:
            raise WireError("descriptors were lost: more were sent at once than a frame may carry")
        return self.feed(data)

    def feed(self, data: bytes) -> bool:
        self._bytes += data
        return bool(data)

    def frames(self) -> Iterator[tuple[MessageT, list[int]]]:
        """Yield the complete frames so far. The caller owns the descriptors of each."""
        while len(self._bytes) >= _HEADER.size:
            length, descriptor_count = _HEADER.unpack_from(self._bytes)
            check_length(length, FRAME_BYTES_MAX)
            if len(self._bytes) < _HEADER.size + length:
                return
            body = bytes(self._bytes[_HEADER.size : _HEADER.size + length])
            del self._bytes[: _HEADER.size + length]
            yield decode(self._decoder, body), self._take_descriptors(descriptor_count)

    def close(self) -> None:
        """Close descriptors that came for frames that will not be read."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _take_descriptors(self, count: int) -> list[int]:
        if count > len(self._descriptors):
            raise WireError(f"a frame announced {count} descriptors and brought {len(self._descriptors)}")
        return [self._descriptors.popleft() for _ in range(count)]
