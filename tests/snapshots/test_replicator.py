"""Agents that send their snapshots to each other, over real sockets: what is newest arrives, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent.test_agent import agent
from holdfast.core.events import SessionInfo
from holdfast.core.image_info import BLOCK_BYTES
from holdfast.core.orders import Peer
from holdfast.core.shard_map import ShardMap
from holdfast.snapshots import replicator as module
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.snapshots.replication import Replication
from holdfast.snapshots.replicator import NoImages, Replicator
from holdfast.snapshots.transfer import BulkClient
from support.bulks import Proxy, bulk_client, bulk_server, label, noise
from support.file_images import FileImages
from support.nest import eventually_async
from support.worker_groups import agent_config, serve

TOKEN = "a token of sixteen characters or more"


def peer(port: int, node_id: str = "b", workers: int = 2) -> Peer:
    return Peer(node_id=node_id, address="127.0.0.1", bulk_port=port, workers=workers)


@contextlib.asynccontextmanager
async def replicating(images: FileImages, *ports: int, **more: Any) -> AsyncIterator[Replicator]:
    replicator = Replicator("a", images, token=TOKEN, tls=None, **more)
    replicator.follow(peer(port, f"partner-{number}") for number, port in enumerate(ports))
    try:
        yield replicator
    finally:
        await replicator.close()


def steps(replicas: ReplicaStore, local_rank: int = 0) -> list[int]:
    return sorted(held.info.step for held in replicas.images() if held.info.local_rank == local_rank)


def contents(replicas: ReplicaStore) -> dict[int, bytes]:
    return {held.info.step: held.path.read_bytes() for held in replicas.images()}


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.holdfast_event for record in caplog.records if hasattr(record, "holdfast_event")]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_the_newest_goes_to_every_partner_and_then_the_newest_again(tmp_path: Path) -> None:
    async def test() -> None:
        images = FileImages(tmp_path / "own")
        images.seal(1, b"one")
        with bulk_server(tmp_path / "b") as (one, b), bulk_server(tmp_path / "c") as (other, c):
            async with replicating(images, one.port, other.port) as replicator:
                await eventually_async(lambda: steps(b) == steps(c) == [1], "the first is there")
                assert replicator.safe_version(1) is None
                images.seal(2, b"two", checked=False)
                images.seal(1, b"of rank 1", local_rank=1)
                await eventually_async(lambda: steps(b) == steps(c) == [1, 2] and steps(b, 1) == [1], "the second")
                images.seal(2, b"of rank 1", local_rank=1)
                await eventually_async(lambda: steps(b, 1) == steps(c, 1) == [1, 2], "all is there")
                safe = lambda: [replicator.safe_version(local_rank) for local_rank in range(2)]  # noqa: E731
                await eventually_async(lambda: safe() == [(1, 2), (1, 2)], "and it is known")
            assert contents(b)[1] == b"of rank 1" or contents(b)[1] == b"one"

    run(test)


def test_a_partner_that_is_slow_gets_what_is_newest_when_it_is_ready(tmp_path: Path) -> None:
    async def test() -> None:
        images = FileImages(tmp_path / "own")
        with (
            bulk_server(tmp_path / "b") as (slow, b),
            bulk_server(tmp_path / "c") as (quick, c),
            Proxy(slow.port, stop_at=BLOCK_BYTES) as proxy,
        ):
            images.seal(1, noise(3 * BLOCK_BYTES))
            async with replicating(images, proxy.port, quick.port) as replicator:
                await eventually_async(lambda: steps(c) == [1], "the quick one does not wait")
                await eventually_async(proxy.stopped.is_set, "the slow one hangs in the middle")
                for step in range(2, 6):
                    images.seal(step, b"step %d" % step)
                await eventually_async(lambda: 5 in steps(c), "the quick one goes on")
                assert steps(b) == [] and replicator.safe_version(0) is None
                replicator.follow([peer(slow.port, "partner-0"), peer(quick.port, "partner-1")])
                await eventually_async(lambda: steps(b) == [5], "only the newest")
                assert contents(b)[5] == b"step 5"

    run(test)


def test_what_arrives_after_the_job_has_gone_back_behind_it_is_not_taken_for_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there, may_go_on, told = threading.Event(), threading.Event(), list[tuple[Any, ...]]()
    real = BulkClient.put

    def put(*arguments: Any) -> None:
        real(*arguments)
        is_there.set()
        assert may_go_on.wait(20)

    monkeypatch.setattr(BulkClient, "put", put)

    async def test() -> None:
        images = FileImages(tmp_path / "own")
        image = images.seal(9, b"nine")
        with bulk_server(tmp_path / "b") as (server, _):
            async with replicating(images, server.port, on_safe=lambda _, *one: told.append(one)) as replicator:
                await eventually_async(is_there.is_set, "step 9 is there, and the sender has not heard it yet")
                images._images[0].remove(image)
                replicator.discard_after(5)
                images.seal(4, b"four", view=2)
                may_go_on.set()
                await eventually_async(lambda: bool(told), "the next one is there")
                assert told == [(0, (2, 4))]

    run(test)


def test_a_partner_that_comes_back_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.01)

    async def test() -> None:
        images = FileImages(tmp_path / "own")
        images.seal(1, b"one")
        with bulk_server(tmp_path / "b") as (server, b), Proxy(server.port) as proxy:
            async with replicating(images, proxy.port):
                await eventually_async(lambda: steps(b) == [1], "the first is there")
                b.assign({})
                with caplog.at_level("INFO", "holdfast"):
                    images.seal(2, b"two")
                    await eventually_async(lambda: "replication-failing" in events(caplog), "a warning")
                    b.assign({"a": 1})
                    await eventually_async(lambda: steps(b) == [1, 2], "without anything new")
                    await eventually_async(lambda: "replication-recovered" in events(caplog), "a message")
                assert events(caplog).count("replication-failing") == 1
                assert (
                    "step 2 of local rank 0 cannot be copied to partner-0: no images of a are assigned to this node;"
                    " retrying"
                ) in caplog.messages

    run(test)


def test_a_lost_partner_is_replaced_and_the_other_is_not_disturbed(tmp_path: Path) -> None:
    async def test() -> None:
        images = FileImages(tmp_path / "own")
        images.seal(1, b"one")
        with (
            bulk_server(tmp_path / "b") as (first, b),
            bulk_server(tmp_path / "c") as (stays, c),
            bulk_server(tmp_path / "d") as (fresh, d),
        ):
            async with replicating(images, first.port, stays.port) as replicator:
                await eventually_async(lambda: steps(b) == steps(c) == [1], "both have it")
                first.close()
                follower = replicator._followers[peer(stays.port, "partner-1")]
                replicator.follow([peer(stays.port, "partner-1"), peer(fresh.port, "partner-2")])
                await eventually_async(lambda: steps(d) == [1], "the new one gets what there is at once")
                assert replicator._followers[peer(stays.port, "partner-1")] is follower

    run(test)


def test_an_image_that_is_overwritten_before_its_turn_is_left_out(tmp_path: Path) -> None:
    async def test() -> None:
        images = FileImages(tmp_path / "own")
        images.seal(1, b"one").path.unlink()
        with bulk_server(tmp_path / "b") as (server, b):
            async with replicating(images, server.port):
                await asyncio.sleep(0)
                images.seal(2, b"two")
                await eventually_async(lambda: steps(b) == [2], "the next one")

    run(test)


# --- the whole of it, as an agent has it


@contextlib.asynccontextmanager
async def nodes(directory: Path, *names: str, **changes: Any) -> AsyncIterator[dict[str, Replication]]:
    found = {}
    for name in names:
        config = agent_config(directory, node_id=name, token=TOKEN, snapshot_dir=str(directory / "memory"), **changes)
        found[name] = Replication(config, FileImages(directory / "own" / name))
    try:
        yield found
    finally:
        for one in found.values():
            await one.close()


def ring(found: dict[str, Replication], session: SessionInfo | None = None) -> None:
    names = list(found)
    peers = {name: peer(one.port, name, 1) for name, one in found.items()}
    for index, name in enumerate(names):
        found[name].serve(
            serve(
                1,
                workers=1,
                world_size=len(names),
                group_world_size=len(names),
                session=session,
                partners=(peers[names[(index + 1) % len(names)]],),
                replica_owners=(peers[names[index - 1]],),
            )
        )


def sealed(one: Replication, step: int, content: bytes) -> None:
    assert isinstance(one._images, FileImages)
    one._images.seal(step, content)


def test_in_a_ring_each_holds_the_images_of_the_one_before(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, "a", "b", "c") as found:
            ring(found, SessionInfo(shard_map=ShardMap(3)))
            for name, one in found.items():
                sealed(one, 1, name.encode())
            await eventually_async(lambda: all(len(one.images()) == 1 for one in found.values()), "all have one")
            assert {n: one.images()[0].info.node_id for n, one in found.items()} == {"a": "c", "b": "a", "c": "b"}
            assert found["b"].images()[0].path.is_relative_to(tmp_path / "memory" / "job" / "b" / "replicas" / "a")
            await found["a"].replicator.close()
            sealed(found["a"], 2, b"a")
            found["b"].pause()
            assert [held.info.step for held in found["b"].images()] == [1], "it may be all that is left"
        assert not list((tmp_path / "memory").glob("job/*/replicas")), "nothing stays when they have ended"

    run(test)


def test_state_that_is_on_other_nodes_anyway_is_not_sent(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, "a", "b") as found:
            ring(found, SessionInfo(shard_map=ShardMap(1)))
            sealed(found["a"], 1, b"a")
            assert found["a"].partners == 0
            ring(found, SessionInfo(shard_map=ShardMap(2)))
            await eventually_async(lambda: [h.info.step for h in found["b"].images()] == [1], "now it is")

    run(test)


def test_a_node_without_snapshots_sends_none(tmp_path: Path) -> None:
    async def test() -> None:
        one = Replication(agent_config(tmp_path, token=TOKEN, snapshot_dir=str(tmp_path)), NoImages())
        one.serve(serve(1, partners=(peer(1),)))
        await asyncio.sleep(0)
        assert one.safe_version(0) is None and one.images() == []
        await one.close()

    run(test)


def test_an_agent_does_with_its_partners_what_its_orders_say(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path, token=TOKEN, snapshot_dir=str(tmp_path / "memory")) as job:
            port = job.agent.hello().info.bulk_port
            await job.begin(partners=(peer(port, "b"),), replica_owners=(peer(port, "a", 2),))
            replication = job.agent._replication
            assert replication.partners == 1
            await asyncio.to_thread(put, port, "image")
            assert [held.path.read_bytes() for held in replication.images()] == [b"image"]
        with pytest.raises(OSError):
            put(port, "image")
        assert not (tmp_path / "memory").exists(), "nothing stays when the job is over"

    run(test)


def put(port: int, content: str) -> None:
    with bulk_client(port, token=TOKEN) as client:
        client.put(label(1, content.encode()), memoryview(content.encode()))
