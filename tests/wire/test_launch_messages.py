"""Frames keep their order, their size limits and their descriptors, however the bytes arrive."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.errors import WireError
from holdfast.wire.launch_messages import (
    FRAME_BYTES_MAX,
    FRAME_DESCRIPTORS_MAX,
    BecomeStoreHost,
    CloseStore,
    FrameReader,
    OpenStore,
    StoreHostRequest,
    encode,
    send,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def reader() -> FrameReader[StoreHostRequest]:
    return FrameReader(msgspec.msgpack.Decoder(StoreHostRequest))


def test_bytes_may_come_one_by_one() -> None:
    frames = reader()
    messages: list[StoreHostRequest] = [OpenStore(1, "here", 29500), CloseStore(1)]
    seen = []
    for byte in b"".join(map(encode, messages)):
        assert frames.feed(bytes([byte]))
        seen += [message for message, _ in frames.frames()]
    assert seen == messages


def test_descriptors_reach_the_frame_they_were_sent_with(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    pipes = [os.pipe() for _ in range(3)]
    send(left, CloseStore(0))
    for number, (_, writing) in enumerate(pipes):
        send(left, OpenStore(number, "", 0), [writing])
        send(left, CloseStore(number))
        os.close(writing)
    frames = reader()
    received: dict[int, int] = {}
    while len(received) < 3:
        assert frames.receive(right)
        for message, descriptors in frames.frames():
            if isinstance(message, OpenStore):
                [received[message.view]] = descriptors
            else:
                assert descriptors == []
    for number, (reading, _) in enumerate(pipes):
        assert not os.get_inheritable(received[number])
        os.write(received[number], bytes([number]))
        os.close(received[number])
        assert os.read(reading, 10) == bytes([number])
        os.close(reading)


def test_the_end_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert not reader().receive(pair[1])


def test_descriptors_for_a_frame_that_never_came_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    reading, writing = os.pipe()
    socket.send_fds(pair[0], [b"\0"], [writing])
    os.close(writing)
    frames = reader()
    frames.receive(pair[1])
    frames.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (struct.pack("!IB", FRAME_BYTES_MAX + 1, 0), "was announced"),
        (struct.pack("!IB", 1, 0) + b"\xc1", "cannot be decoded"),
        (encode(BecomeStoreHost(1)), "cannot be decoded"),
        (struct.pack("!IB", len(encode(CloseStore(1))) - 5, 2) + encode(CloseStore(1))[5:], "announced 2 descriptors"),
    ],
)
def test_what_does_not_belong_is_refused(data: bytes, complaint: str) -> None:
    frames = reader()
    frames.feed(data)
    with pytest.raises(WireError, match=complaint):
        list(frames.frames())


def test_what_would_be_refused_is_not_sent() -> None:
    with pytest.raises(WireError, match="exceeds"):
        encode(OpenStore(1, "x" * (FRAME_BYTES_MAX + 1), 0))
    with pytest.raises(WireError, match="exceed"):
        encode(CloseStore(1), FRAME_DESCRIPTORS_MAX + 1)
