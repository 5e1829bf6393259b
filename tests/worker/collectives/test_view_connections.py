"""Ending a view: every communicator is freed whatever another one does, and the thread that listens goes on."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from holdfast.errors import LaunchError, ViewOverError
from holdfast.wire.launch_messages import FrameReader, send, socket_address
from holdfast.wire.worker_messages import Enrol, Release, Revoke
from holdfast.worker.agent_connection import AgentConnection
from holdfast.worker.collectives.view_connections import Freeing, ViewConnections, store_addresses

WAIT_S = 20.0


class Freed:
    """A communicator that notes who was freed and dropped."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def make(self, *_: object) -> Any:
        raise NotImplementedError

    def free(self, inner: Any) -> None:
        self.notes.append(f"freed {self.name}")

    def drop(self, inner: Any) -> None:
        self.notes.append(f"dropped {self.name}")


class Raising(Freed):
    def free(self, inner: Any) -> None:
        raise RuntimeError("ProcessGroup abort timed out")

    def drop(self, inner: Any) -> None:
        raise RuntimeError("cannot be dropped")


class Blocking(Freed):
    let_go = threading.Event()

    def free(self, inner: Any) -> None:
        assert self.let_go.wait(WAIT_S)
        super().free(inner)


def connections_of(*communicators: Freed, stuck: list[str] | None = None) -> ViewConnections:
    connections = ViewConnections(1, None, 0, 2, (stuck if stuck is not None else []).append)
    connections._made = [(communicator, None) for communicator in communicators]
    return connections


def eventually(condition: Any) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def test_all_are_freed_and_dropped_though_the_first_raises() -> None:
    notes: list[str] = []
    stuck: list[str] = []
    connections = connections_of(Raising("world", notes), Freed("shard", notes), Freed("replicate", notes), stuck=stuck)
    connections.end("a peer died")
    connections.wait_until_freed()
    assert sorted(notes) == ["freed replicate", "freed shard"]
    with pytest.raises(ViewOverError, match="a peer died"):
        connections.check()
    assert eventually(lambda: stuck) and "RuntimeError: ProcessGroup abort timed out" in stuck[0]
    connections.retire().join(WAIT_S)
    assert sorted(notes)[:2] == ["dropped replicate", "dropped shard"]


def test_one_that_blocks_delays_neither_the_others_nor_the_thread_that_ends_the_view() -> None:
    notes: list[str] = []
    Blocking.let_go.clear()
    connections = connections_of(Blocking("world", notes), Freed("shard", notes))
    connections.end("a peer died")  # would hang here, if it waited
    assert eventually(lambda: notes == ["freed shard"])
    Blocking.let_go.set()
    connections.wait_until_freed()
    assert notes == ["freed shard", "freed world"]


def test_one_that_is_not_free_in_time_is_told() -> None:
    stuck: list[str] = []
    Blocking.let_go.clear()
    Freeing([(Blocking("world", []), None), (Freed("shard", []), None)], stuck.append, timeout_s=0.1)
    assert eventually(lambda: stuck) and "1 of 2 did not return within 0.1 s" in stuck[0]
    Blocking.let_go.set()


def test_a_view_without_communicators_has_nothing_to_wait_for() -> None:
    stuck: list[str] = []
    connections = connections_of(stuck=stuck)
    before = threading.active_count()
    connections.end("x")
    assert threading.active_count() <= before
    connections.wait_until_freed()
    assert not stuck


# --- the thread that listens


class Agent:
    """The other end of a worker's line."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "agent.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_address(self.path))
        self._listener.listen(1)
        self._listener.settimeout(WAIT_S)

    def accept(self) -> socket.socket:
        connection, _ = self._listener.accept()
        self._listener.close()
        reader = FrameReader(msgspec.msgpack.Decoder(Enrol))
        assert reader.receive(connection)
        return connection


def test_the_listening_thread_survives_a_revoke_that_raises(tmp_path: Path) -> None:
    revoked: list[int] = []

    def revoke(why: str, view: int) -> None:
        revoked.append(view)
        raise RuntimeError("abort timed out")

    agent = Agent(tmp_path)
    line = AgentConnection(agent.path, "worker", revoke)
    connection = agent.accept()
    send(connection, Revoke(view=1, why="x"))
    send(connection, Release(view=2))
    assert line.wait_for_assignment(1) is None, "the message after it is heard"
    assert revoked == [1]
    connection.close()


def test_the_death_of_the_listening_thread_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", deaths.append)

    def take(self: AgentConnection, message: Any) -> None:
        raise AssertionError("a bug of ours")

    monkeypatch.setattr(AgentConnection, "_handle", take)
    revoked: list[int] = []
    agent = Agent(tmp_path)
    line = AgentConnection(agent.path, "worker", lambda why, view: revoked.append(view))
    connection = agent.accept()
    send(connection, Release(view=2))
    with pytest.raises(LaunchError):
        line.wait_for_assignment(1)  # would wait for ever
    assert revoked, "a main thread that hangs in a collective is freed: nobody else could tell it"
    connection.settimeout(WAIT_S)
    assert connection.recv(1) == b"", "and the agent hears of it"
    assert not deaths
    connection.close()


def test_a_message_that_cannot_be_read_is_the_same(tmp_path: Path) -> None:
    revoked: list[int] = []
    agent = Agent(tmp_path)
    line = AgentConnection(agent.path, "worker", lambda why, view: revoked.append(view))
    connection = agent.accept()
    connection.sendall(b"\xff" * 64)
    with pytest.raises(LaunchError):
        line.wait_for_assignment(1)
    assert revoked
    connection.close()


def test_an_agent_that_has_gone_ends_no_view(tmp_path: Path) -> None:
    revoked: list[int] = []
    agent = Agent(tmp_path)
    line = AgentConnection(agent.path, "worker", lambda why, view: revoked.append(view))
    agent.accept().close()
    with pytest.raises(LaunchError):
        line.wait_for_assignment(1)
    assert not revoked


def test_the_end_of_a_view_breaks_its_stores_connections() -> None:
    """A communicator that connects in its first collective waits for the store without a promise of ours."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    connections = ViewConnections(1, client, 0, 2)
    connections.mesh.add_store(store_addresses(client))
    threading.Timer(0.2, connections.end, ["a peer died"]).start()
    began_at = time.monotonic()
    with pytest.raises(dist.DistError):
        client.get("ncclUniqueId")
    assert time.monotonic() - began_at < WAIT_S / 2
