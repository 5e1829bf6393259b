"""Noticing that a connection broke."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from holdfast.worker.collectives.break_watch import BreakWatch

DEADLINE_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def watch_of(sock: socket.socket) -> BreakWatch:
    return BreakWatch({sock.fileno(): os.fstat(sock.fileno()).st_ino}, 1)


def waiting(watch: BreakWatch) -> threading.Thread:
    thread = threading.Thread(target=watch.wait_for_break, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("end", ["peer closes", "ours is shut", "woken"])
def test_the_wait_ends(pair: tuple[socket.socket, socket.socket], end: str) -> None:
    ours, theirs = pair
    watch = watch_of(ours)
    thread = waiting(watch)
    theirs.send(b"data is no break")
    assert not watch.is_broken() and thread.is_alive()
    match end:
        case "peer closes":
            theirs.close()
        case "ours is shut":
            ours.shutdown(socket.SHUT_RDWR)
        case "woken":
            watch.wake()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert watch.is_broken() == (end != "woken")
    watch.close()


def test_the_other_side_is_told_even_if_the_owner_has_closed_its_own(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    watch = watch_of(ours)
    ours.close()
    watch.shut()
    theirs.settimeout(DEADLINE_S)
    assert theirs.recv(1) == b""
    watch.close()
    watch.close()
    watch.wake()


def test_another_socket_at_the_same_descriptor_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    watch = BreakWatch({ours.fileno(): os.fstat(theirs.fileno()).st_ino}, 1)
    assert watch.copies == {}
    watch.close()


def test_a_connection_that_was_gone_before_the_watch_began_is_a_break(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    inode = os.fstat(ours.fileno()).st_ino
    whole, short = BreakWatch({ours.fileno(): inode}, 1), BreakWatch({ours.fileno(): inode}, 2)
    assert not whole.is_broken()
    assert short.is_broken()
    thread = waiting(short)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    whole.close()
    short.close()


def test_a_socket_that_does_not_block_stays_so(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    ours.setblocking(False)
    watch = watch_of(ours)
    assert not os.get_blocking(ours.fileno())
    watch.close()
