"""Groups of agents that keep parity for each other, over real sockets: whoever is lost, its image is made again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.image_info import ImageInfo
from holdfast.core.orders import Peer
from holdfast.errors import ReplicaError
from holdfast.snapshots.parity import parity_store
from holdfast.snapshots.parity.arithmetic import piece
from holdfast.snapshots.parity.parity_store import ParityStore
from holdfast.snapshots.parity.rounds import LocalRankRounds
from holdfast.snapshots.replication import Replication
from holdfast.snapshots.replicator import find_image
from holdfast.util import blocks
from holdfast.wire.bulk_messages import Contribute
from support.bulks import TOKEN, noise
from support.file_images import FileImages
from support.nest import eventually_async
from support.slot_records import checksums_of
from support.worker_groups import agent_config, serve


class Group:
    """Some agents, without their workers and without a master."""

    def __init__(self, directory: Path, names: str, workers: dict[str, int], **more: Any) -> None:
        self.names, self.workers = list(names), workers
        self.own = {name: FileImages(directory / "own" / name) for name in names}
        self.nodes = {
            name: Replication(
                agent_config(directory, node_id=name, token=TOKEN, snapshot_dir=str(directory / "memory")),
                self.own[name],
                **more,
            )
            for name in names
        }

    def serve(self, names: str, view: int = 1) -> None:
        peers = tuple(
            Peer(node_id=n, address="127.0.0.1", bulk_port=self.nodes[n].port, workers=self.workers.get(n, 1))
            for n in names
        )
        for name in names:
            self.nodes[name].serve(serve(view, workers=self.workers.get(name, 1), parity=peers))

    def seal(
        self, names: str, step: int, size: int = 100_000, view: int = 1, local_rank: int = 0, complete: int = -1
    ) -> dict[str, bytes]:
        found = {name: noise(size + 10 * number) for number, name in enumerate(names)}
        for name, content in found.items():
            is_checked = name != names[-1]
            self.own[name].seal(step, content, local_rank, view, checked=is_checked, complete=complete)
        return found

    async def sealed(self, names: str, step: int, view: int = 1, local_rank: int = 0) -> None:
        def all_have() -> bool:
            return all(self.nodes[n].parity_sealed().get(local_rank) == (view, step) for n in names)

        await eventually_async(all_have, f"step {step} is sealed on {names}")


@contextlib.asynccontextmanager
async def group(directory: Path, names: str, **workers: int) -> AsyncIterator[Group]:
    made = Group(directory, names, workers)
    made.serve(names)
    try:
        yield made
    finally:
        for one in made.nodes.values():
            await one.close()
    assert not (directory / "memory").exists()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
def test_whoever_is_lost_is_made_again(tmp_path: Path, names: str) -> None:
    async def test() -> None:
        async with group(tmp_path, names) as made:
            images = made.seal(names, 1)
            await made.sealed(names, 1)
            parity = list(tmp_path.glob("memory/job/*/parity/rank-0/image-*"))
            assert len(parity) == len(names)
            assert all(p.stat().st_size <= 100_100 / (len(names) - 1) + 4_096 for p in parity)
            for lost, asker in zip(names, names[1:] + names[0], strict=True):
                held = await made.nodes[asker].rebuild(lost, 0)
                assert held.path.read_bytes() == images[lost]
                assert held.info.checksums == checksums_of(images[lost])
            with pytest.raises(ReplicaError, match="no image of z"):
                await made.nodes["a"].rebuild("z", 0)

    run(test)


def test_while_a_round_is_under_way_the_one_before_can_be_made_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc") as made:
            before = made.seal("abc", 1)
            await made.sealed("abc", 1)
            made.seal("ac", 2)  # b is late, and then lost
            await eventually_async(lambda: made.nodes["b"]._parity.announced(0, "a") == (1, 2), "b has heard of it")  # type: ignore[union-attr]
            await made.nodes["b"].close()
            assert (await made.nodes["a"].rebuild("b", 0)).path.read_bytes() == before["b"]
            assert all(find_image(made.own[n], 0, (1, 1)) is not None for n in "ac"), "its images are there too"

    run(test)


def test_the_parity_of_what_is_whole_everywhere_stays_until_a_later_step_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc") as made:
            first = made.seal("abc", 1)
            await made.sealed("abc", 1)
            for step in (2, 3):  # of which other groups never had anything
                made.seal("abc", step, complete=1)
                await made.sealed("abc", step)
            kept = {n: [known.image.step for known in made.nodes[n]._parity.sealed(0)] for n in "abc"}  # type: ignore[union-attr]
            assert all(sorted(found) == [1, 3] for found in kept.values()), kept
            await made.nodes["b"].close()
            assert (await made.nodes["a"].rebuild("b", 0)).info.step == 3
            held = {one.info.step: one.path.read_bytes() for one in made.nodes["a"].images()}
            assert held.keys() == {1, 3} and held[1] == first["b"], "of step 3 other groups may not have everything"

    run(test)


def test_from_the_order_on_images_wait_for_their_parity_and_it_is_told_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        said: list[tuple[int, tuple[int, int]]] = []
        made = Group(tmp_path, "ab", {}, on_safe=lambda where, *image: said.append(image))
        made.serve("ab")
        one = made.nodes["a"]
        assert one.partners == 1 and one.safe_version(0) is None, "the rounds begin a moment later"
        made.seal("ab", 8)
        await eventually_async(lambda: said.count((0, (1, 8))) == 2, "both have heard")
        assert one.safe_version(0) == (1, 8)
        for node in made.nodes.values():
            node.discard_after(5)
        assert one.safe_version(0) is None, "what is done again is not there yet"
        for node in made.nodes.values():
            await node.close()

    run(test)


def test_rounds_that_are_over_hold_no_image(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc") as made:
            for step in range(1, 5):
                images = made.seal("abc", step)
                await made.sealed("abc", step)
            assert all(len(made.own[n]._images[0]) == 2 for n in "abc")
            newest = made.own["a"].images()[0]
            assert newest.readers == 0, "its worker may need the slot: it knows what has to stay"
            assert (await made.nodes["c"].rebuild("a", 0)).path.read_bytes() == images["a"]

    run(test)


def test_images_may_grow_and_shrink_from_round_to_round(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc") as made:
            for step, sizes in enumerate([(9, 5, 3), (1, 2, 3), (20, 1, 9), (3, 30, 3), (4, 4, 4)], 1):
                images = {n: noise(size * 100_000 + 7) for n, size in zip("abc", sizes, strict=True)}
                for name, content in images.items():
                    made.own[name].seal(step, content)
                await made.sealed("abc", step)
                for lost, asker in ("ab", "bc", "ca"):
                    assert (await made.nodes[asker].rebuild(lost, 0)).path.read_bytes() == images[lost]

    run(test)


def test_members_that_see_different_steps_agree_on_the_first_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc") as made:
            images = made.seal("abc", 1)
            made.seal("bc", 2)  # a is a step behind, and has the word
            await made.sealed("abc", 1)
            assert (await made.nodes["a"].rebuild("c", 0)).path.read_bytes() == images["c"]

    run(test)


def test_a_member_with_fewer_workers_takes_part_all_the_same(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc", a=1, b=2, c=2) as made:
            first, second = made.seal("abc", 1), made.seal("bc", 1, local_rank=1)
            await made.sealed("abc", 1)
            await made.sealed("bc", 1, local_rank=1)
            assert (await made.nodes["a"].rebuild("c", 1)).path.read_bytes() == second["c"]
            assert (await made.nodes["b"].rebuild("c", 0)).path.read_bytes() == first["c"]

    run(test)


def test_a_lost_member_is_made_again_after_the_group_has_changed(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abcd") as made:
            made.serve("abc")
            images = made.seal("abc", 1)
            await made.sealed("abc", 1)
            await made.nodes["b"].close()
            made.serve("acd", view=2)
            assert (await made.nodes["c"].rebuild("b", 0)).path.read_bytes() == images["b"]
            later = made.seal("acd", 2, view=2)
            await made.sealed("acd", 2, view=2)
            assert (await made.nodes["a"].rebuild("d", 0)).path.read_bytes() == later["d"]

    run(test)


@pytest.mark.parametrize("names", ["abc", "acd", "ac"])
def test_the_next_life_of_all_agents_makes_it_again_whether_the_node_is_back_or_not(tmp_path: Path, names: str) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc") as made:
            images = made.seal("abc", 1)
            await made.sealed("abc", 1)
            again = Group(tmp_path, names, {})
            for name in "ac":
                again.own[name] = again.nodes[name]._images = made.own[name]  # in shared memory, as the parity is
            again.serve(names, view=2)
            for name in names:
                await again.nodes[name].rebuild_lost()
            held = [(one.info.node_id, one.path.read_bytes()) for name in names for one in again.nodes[name].images()]
            assert held == [("b", images["b"])], "once, and nothing of those who have theirs"
            for node in again.nodes.values():
                await node.close()

    run(test)


def test_damaged_parity_is_noticed_and_not_held(tmp_path: Path) -> None:
    async def test() -> None:
        async with group(tmp_path, "abc") as made:
            made.seal("abc", 1)
            await made.sealed("abc", 1)
            (file,) = tmp_path.glob("memory/job/c/parity/rank-0/image-*")
            content = bytearray(file.read_bytes())
            content[100] ^= 1
            file.write_bytes(content)
            with pytest.raises(ReplicaError, match="does not match its checksum"):
                await made.nodes["a"].rebuild("b", 0)
            assert not made.nodes["a"].images()

    run(test)


# --- the store alone


def piece_of(node_id: str, step: int, content: bytes, group: str = "abc") -> Contribute:
    described = ImageInfo(
        node_id=node_id, local_rank=0, part=0, shards=1, shares=1, view=1, step=step,
        size_bytes=2 * len(content), checksums=checksums_of(content),
    )  # fmt: skip
    return Contribute(image=described, group=tuple(group), size_bytes=len(content))


def store(root: Path) -> ParityStore:
    made = ParityStore(root, "c")
    made.join({"a": 1, "b": 1, "c": 1})
    return made


def give(to: ParityStore, node_id: str, step: int, content: bytes) -> None:
    sink = to.contribute(piece_of(node_id, step, content))
    assert sink is not None
    sink.buffer(0)[:] = content
    sink.accept(0)
    sink.accept(0)  # as after a line that broke before the answer was heard
    sink.seal(b"")


def test_a_block_counts_once_and_a_contributor_that_comes_again_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_store, "SEAL_WAIT_S", 0.0)
    one, other = noise(4_096), noise(4_096)
    kept = store(tmp_path)
    for _ in range(2):
        with pytest.raises(ReplicaError, match="others of the parity group have not contributed yet"):
            give(kept, "a", 1, one)
    give(kept, "b", 1, other)
    with kept.reading(0, 1, 1) as found:
        assert found == bytes(x ^ y for x, y in zip(one, other, strict=True))
    assert kept.contribute(piece_of("a", 1, one)) is None
    assert [one.image.step for one in ParityStore(tmp_path, "c").inventory()] == [1], "the next life finds it"


def test_a_newer_step_ends_one_that_is_not_complete_and_the_sealed_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_store, "SEAL_WAIT_S", 0.0)
    kept, content = store(tmp_path), noise(4_096)
    for step, nodes in ((1, "ab"), (2, "a"), (3, "b")):
        for node_id in nodes:
            with contextlib.suppress(ReplicaError):
                give(kept, node_id, step, content)
    assert [one.image.step for one in kept.inventory()] == [1]
    with pytest.raises(ReplicaError, match="older than what is collected"):
        kept.contribute(piece_of("b", 2, content))
    give(kept, "a", 3, content)
    assert sorted(one.image.step for one in kept.inventory()) == [1, 3]


@pytest.mark.parametrize(
    ("offered", "sentence"),
    [
        (piece_of("a", 1, b"x" * 4_096, group="ab"), "another parity group"),
        (piece_of("c", 1, b"x" * 4_096), "has no worker"),
        (piece_of("a", 1, b"x" * 4_095), "not the one for this node"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, offered: Contribute, sentence: str) -> None:
    with pytest.raises(ReplicaError, match=sentence):
        store(tmp_path).contribute(offered)
    assert not list(tmp_path.iterdir())


@given(st.lists(st.tuples(st.integers(1, 40_000), st.integers(1, 40_000)), min_size=3, max_size=5), st.randoms())
@settings(deadline=None, max_examples=60)
def test_pieces_of_any_size_in_any_order_make_parity(sizes: list[tuple[int, int]], chance: random.Random) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for module in (blocks, parity_store):
            patch.setattr(module, "BLOCK_BYTES", 1_000)
        patch.setattr(parity_store, "SEAL_WAIT_S", 0.0)
        kept = store(Path(directory))
        for step, both in enumerate(sizes, 1):
            named = list(zip("ab", both, strict=True))
            pieces = {name: noise(size)[piece(size, 3, "abc".index(name), 2)] for name, size in named}
            sinks = {}
            for name, size in named:
                described = ImageInfo(
                    node_id=name, local_rank=0, part=0, shards=1, shares=1, view=1, step=step,
                    size_bytes=size, checksums=bytes(4 * blocks.block_count(size)),
                )  # fmt: skip
                sinks[name] = kept.contribute(
                    Contribute(image=described, group=("a", "b", "c"), size_bytes=len(pieces[name]))
                )
            order = [(name, index) for name in "ab" for index in range(blocks.block_count(len(pieces[name])))]
            chance.shuffle(order)
            for name, index in order:
                sink = sinks[name]
                assert sink is not None
                sink.buffer(index)[:] = pieces[name][blocks.span(index, len(pieces[name]))]
                sink.accept(index)
            for sink in sinks.values():
                assert sink is not None
                with contextlib.suppress(ReplicaError):
                    sink.seal(b"")
            with kept.reading(0, 1, step) as found:
                longest = max(map(len, pieces.values()), default=0)
                padded = [one + bytes(longest - len(one)) for one in pieces.values()]
                assert bytes(found)[:longest] == bytes(x ^ y for x, y in zip(*padded, strict=True))
                assert len(found) == max(longest, 1)


def test_parity_of_what_the_job_went_back_behind_meanwhile_is_not_taken_for_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, may_go_on, told = [], asyncio.Event(), list[tuple[int, tuple[int, int]]]()
    real = LocalRankRounds._contribute

    async def contribute(self: LocalRankRounds, image: Any, content: memoryview) -> None:
        await real(self, image, content)
        arrived.append(image.info.step)
        await may_go_on.wait()

    monkeypatch.setattr(LocalRankRounds, "_contribute", contribute)

    async def test() -> None:
        made = Group(tmp_path, "ab", {}, on_safe=lambda _, *one: told.append(one))
        made.serve("ab")
        made.seal("ab", 9)
        await eventually_async(lambda: arrived == [9, 9], "step 9 is sealed, and the rounds have not heard it yet")
        for name in "ab":
            made.own[name]._images[0].clear()
            made.nodes[name].discard_after(5)
        may_go_on.set()
        made.seal("ab", 4, view=2)
        await made.sealed("ab", 4, view=2)
        assert set(told) == {(0, (2, 4))}
        for one in made.nodes.values():
            await one.close()

    run(test)
