"""One worker's copies of its state: into which slot, when, and what its next life makes of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from holdfast.core.image_info import ImageInfo, StateKey
from holdfast.core.shard_map import ShardMap
from holdfast.errors import CheckpointError
from holdfast.snapshots.slot_file import ImageLock, SlotPage, SlotStatus, WantedSnapshot
from holdfast.snapshots.snapshot_store import SnapshotStore
from holdfast.state import copier
from holdfast.state.tracked import Tracked
from holdfast.util.blocks import block_checksums
from holdfast.wire.worker_messages import AllocateBuffers, BuffersReady, SnapshotSealed, SnapshotSettings, StoredImage
from holdfast.worker.collectives.small_collectives import outside
from holdfast.worker.restore.from_snapshots import SnapshotChoice, SnapshotRestore, choose
from holdfast.worker.snapshot import copy_schedule
from holdfast.worker.snapshot.taker import SnapshotTaker
from support.jobs import wait_for
from support.simulated_device import DeviceWork


class Agent:
    """Makes room at once, and remembers what it was told."""

    def __init__(self, snapshot_store: SnapshotStore) -> None:
        self.snapshot_store = snapshot_store
        self.buffers_ready: BuffersReady | None = None
        self.sealed: list[SnapshotSealed] = []

    def tell(self, message: AllocateBuffers | SnapshotSealed) -> None:
        if isinstance(message, AllocateBuffers):
            self.buffers_ready = asyncio.run(self.snapshot_store.allocate(0, message.size_bytes))
        else:
            self.sealed.append(message)


class Life:
    """A worker from its start to its death."""

    def __init__(
        self,
        snapshot_store: SnapshotStore,
        view: int,
        first: int = 0,
        restored: int = -1,
        every: int = 1,
        **more: Any,
    ) -> None:
        torch.manual_seed(view)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tracked = Tracked(model=self.model, optimizer=self.optimizer)
        self.agent = Agent(snapshot_store)
        self.snapshots = SnapshotTaker(self.agent, self.tracked, SnapshotSettings(every=every, **more))
        self.snapshots.start_from(restored)
        self.snapshots.enter(ImageInfo(-1, 0, 1, 1, view, seed=3, first_step=first), 1)
        self.next = first
        self.states: dict[int, list[torch.Tensor]] = {}

    def step(self, has: bool = True) -> None:
        """As the engine does it, alone in the world. `has`: whether the others have the last one too."""
        self.states[self.next] = [tensor.clone() for tensor in self.tracked.state().tensors]
        self.snapshots.begin(self.next)
        self.body()
        self.model(torch.randn(4, 8)).sum().backward()
        self.snapshots.join(self.optimizer)
        words = list(self.snapshots.vote(self.next))
        self.snapshots.apply_vote(self.next, words if has else [0, *words[1:]])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.snapshots.poll()
        self.next += 1
        self.snapshots.finish_mapping()

    def body(self) -> None:
        """What else it does in a step."""

    def run_to(self, step: int, **choices: bool) -> Self:
        while self.next < step:
            self.step(**choices)
        return self


@pytest.fixture
def snapshot_store(tmp_path: Path) -> Iterator[SnapshotStore]:
    made = SnapshotStore(tmp_path, "node-0")
    made.open("job")
    yield made
    made.close()


def page_of(snapshot_store: SnapshotStore) -> SlotPage:
    found = snapshot_store._pages.get(0)
    assert found is not None
    return found


def steps(snapshot_store: SnapshotStore) -> list[int]:
    return sorted(kept.info.step for kept in snapshot_store.images())


def stored(snapshot_store: SnapshotStore) -> tuple[StoredImage, ...]:
    return tuple(image.stored for image in snapshot_store.images())


def restored_from(
    snapshot_store: SnapshotStore, at_least: int = 0, images: tuple[StoredImage, ...] | None = None
) -> tuple[int, Tracked]:
    model = torch.nn.Linear(8, 8)
    tracked = Tracked(model=model, optimizer=torch.optim.Adam(model.parameters()))
    memory = SnapshotRestore(stored(snapshot_store) if images is None else images, 0, 1, ShardMap(), tracked, outside())
    if (found := memory.load(at_least)) is None:
        memory.raise_refused()
    return (found.step if found is not None else -1), tracked


def test_two_images_follow_each_other(snapshot_store: SnapshotStore) -> None:
    life = Life(snapshot_store, 1).run_to(10)
    assert steps(snapshot_store) == [8, 9] and page_of(snapshot_store).get("complete") == 9
    assert [message.step for message in life.agent.sealed] == sorted(message.step for message in life.agent.sealed)
    step, tracked = restored_from(snapshot_store)
    assert step == 9
    for mine, its in zip(tracked.state().tensors, life.states[9], strict=True):
        assert torch.equal(mine, its)
    life.snapshots.close()


@pytest.mark.parametrize(("after", "left"), [(9, [8, 9]), (8, [8]), (-1, [])])
def test_images_of_what_may_be_wrong_are_given_up_and_others_follow(
    snapshot_store: SnapshotStore, after: int, left: list[int]
) -> None:
    life = Life(snapshot_store, 1).run_to(10)
    life.snapshots.discard_after(after)
    assert steps(snapshot_store) == left and restored_from(snapshot_store)[0] == max(left, default=-1)
    life.run_to(13)
    assert restored_from(snapshot_store)[0] == 12
    life.snapshots.close()


def test_what_is_whole_everywhere_is_kept_while_the_others_lag(snapshot_store: SnapshotStore) -> None:
    """Step 6 is the last one that all have: whatever is copied later goes into the other slot."""
    life = Life(snapshot_store, 1).run_to(7)
    whole = page_of(snapshot_store).get("complete")
    for _ in range(4):
        life.step(has=False)
        assert whole in steps(snapshot_store) and page_of(snapshot_store).get("complete") == whole
    assert steps(snapshot_store) == [whole, 10]
    life.snapshots.close()


def test_the_step_that_all_have_started_from_is_not_overwritten_first(snapshot_store: SnapshotStore) -> None:
    """At the death 9 was there, and only 8 known to be whole everywhere. All start from 9: then 8 gives way."""
    life = Life(snapshot_store, 1).run_to(9)
    life.step(has=False)
    assert (steps(snapshot_store), page_of(snapshot_store).get("complete")) == ([8, 9], 8)
    life.snapshots.close()
    again = Life(snapshot_store, 2, first=9, restored=9).run_to(14, has=False)
    assert (
        9 in steps(snapshot_store) and 8 not in steps(snapshot_store) and page_of(snapshot_store).get("complete") == 9
    )
    again.snapshots.close()


def test_a_checkpoint_that_a_dead_worker_asked_for_blocks_no_slot(snapshot_store: SnapshotStore) -> None:
    life = Life(snapshot_store, 1, checkpoint_every_steps=4).run_to(6)
    wanted = [kept for kept in snapshot_store.images() if kept.record.wanted == WantedSnapshot.YES]
    assert [kept.info.step for kept in wanted] == [4], "it is kept for the agent, which has not begun to read"
    life.run_to(8)
    assert 4 in steps(snapshot_store)
    life.snapshots.close()
    again = Life(snapshot_store, 2, first=7, restored=7).run_to(12)
    assert steps(snapshot_store) == [10, 11]
    again.snapshots.close()


def test_a_checkpoint_that_was_due_when_no_slot_was_free_is_made_up_for(snapshot_store: SnapshotStore) -> None:
    life = Life(snapshot_store, 1, every=100, checkpoint_every_steps=5).run_to(4)
    readers = []
    for number in range(2):
        readers.append(ImageLock(page_of(snapshot_store).path(number), is_writable=False))
        assert readers[-1].acquire()
    life.run_to(7)
    assert not [message for message in life.agent.sealed if message.wanted]
    for reader in readers:
        reader.close()
    life.run_to(10)
    assert [message.step for message in life.agent.sealed if message.wanted] == [8]
    life.snapshots.close()


def test_a_torn_image_is_nothing(snapshot_store: SnapshotStore) -> None:
    life = Life(snapshot_store, 1).run_to(8)
    slot = next(kept.slot for kept in snapshot_store.images() if kept.info.step == 7)
    record = page_of(snapshot_store).record(slot)
    page_of(snapshot_store).write(slot, record._replace(status=SlotStatus.WRITING))
    assert restored_from(snapshot_store)[0] == 6 and restored_from(snapshot_store, at_least=7)[0] == -1
    life.snapshots.close()


def test_where_faults_are_frequent_copies_are_too(snapshot_store: SnapshotStore) -> None:
    life = Life(snapshot_store, 1, every=0).run_to(3)
    life.snapshots._step_s, life.snapshots._stall_s = 1.0, 20.0
    seldom = life.snapshots.vote(3)[2]
    life.snapshots.faults_per_node_day = 100.0
    assert 1 < life.snapshots.vote(3)[2] < seldom
    life.snapshots.close()


# --- the recall


def test_a_damaged_image_gives_way_to_the_one_before(snapshot_store: SnapshotStore) -> None:
    life = Life(snapshot_store, 1).run_to(8)
    newest = snapshot_store.images()[0]
    content = bytearray(page_of(snapshot_store).path(newest.slot).read_bytes()[: newest.info.size_bytes])
    newest.record_checksums(block_checksums(memoryview(bytes(content))))
    content[len(content) // 2] ^= 1
    page_of(snapshot_store).path(newest.slot).write_bytes(content)
    step, tracked = restored_from(snapshot_store)
    assert step == 6
    for mine, its in zip(tracked.state().tensors, life.states[6], strict=True):
        assert torch.equal(mine, its)
    with pytest.raises(CheckpointError, match="step 7 in memory"):
        restored_from(snapshot_store, at_least=7)
    life.snapshots.close()


def test_an_image_that_was_overwritten_meanwhile_is_not_taken_for_the_other(snapshot_store: SnapshotStore) -> None:
    """A worker of an agent that was killed lived on for a moment."""
    life = Life(snapshot_store, 1).run_to(8)
    images = stored(snapshot_store)
    life.run_to(10)
    with pytest.raises(CheckpointError, match="is being overwritten"):
        restored_from(snapshot_store, images=images)
    life.snapshots.close()


def offer(step: int, part: int, view: int = 1, shares: int = 2, is_replica: bool = False) -> StoredImage:
    info = ImageInfo(step, part, 1, shares, view, size_bytes=100, seed=3)
    return StoredImage(path="", info=info, is_replica=is_replica)


def test_the_choice() -> None:
    rows = [[offer(9, 0), offer(8, 0)], [offer(8, 1)]]
    assert choose(rows, 0) == SnapshotChoice(StateKey(8, 1, 1, 2), 3, 0, {0: (0, 100), 1: (1, 100)}, {0, 1})
    assert (
        choose(rows, 8) == choose(rows, 0)
        and choose(rows, 9) is None
        and choose(rows, 0, [StateKey(8, 1, 1, 2)]) is None
    )
    assert choose([[offer(9, 0, view=1)], [offer(9, 1, view=2)]], 0) is None, "two histories are no state"
    both = [[offer(9, 0), offer(9, 0, view=4, shares=1)], [offer(9, 1)]]
    chosen = choose(both, 0)
    assert chosen is not None and chosen.key.view == 4
    held = [[offer(9, 0), offer(9, 1, is_replica=True)]]
    chosen = choose(held, 0)
    assert chosen is not None and not chosen.is_intact, "the node that has made part 1 has lost it"
    chosen = choose([*held, [offer(9, 1)]], 0)
    assert chosen is not None and chosen.is_intact


# --- what changes otherwise than by an update


class Restless(Life):
    """Changes parameters in the body of its steps, before the thread has come to copy them."""

    def __init__(self, snapshot_store: SnapshotStore, changes: Callable[[Restless], None], **more: int) -> None:
        super().__init__(snapshot_store, 1, **more)
        self.changes = changes

    def body(self) -> None:
        with torch.no_grad():
            self.changes(self)


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread never gets a processor: an update copies what is its own, and not before."""
    monkeypatch.setattr(copier, "THREAD_WORTH_BYTES", 0)
    monkeypatch.setattr(copier.StateCopy, "work_off", lambda self: None)


def clamp(life: Restless) -> None:
    for parameter in life.model.parameters():
        parameter.clamp_(-0.1, 0.1)


def clamp_from_step_5_on(life: Restless) -> None:
    if life.next >= 5:
        clamp(life)


def clamp_from_step_10_on(life: Restless) -> None:
    if life.next >= 10:
        clamp(life)


def clamp_in_turn(life: Restless) -> None:
    [life.model.weight, life.model.bias][life.next // 3 % 2].clamp_(-0.1, 0.1)


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize(("changes", "spoiled_max"), [(clamp, 1), (clamp_in_turn, 2)])
def test_parameters_that_a_body_changes_are_kept_all_the_same(
    snapshot_store: SnapshotStore,
    changes: Callable[[Restless], None],
    spoiled_max: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    life = Restless(snapshot_store, changes).run_to(20)
    assert 1 <= page_of(snapshot_store).get("spoiled") <= spoiled_max
    assert "was changed in the body of the step" in caplog.text and len(caplog.records) == 1
    step, tracked = restored_from(snapshot_store)
    assert (step, page_of(snapshot_store).get("complete")) == (19, 19)
    for mine, its in zip(tracked.state().tensors, life.states[19], strict=True):
        assert torch.equal(mine, its)
    life.snapshots.close()


@pytest.mark.usefixtures("busy_machine")
def test_a_checkpoint_that_was_spoiled_is_made_with_the_next_step(snapshot_store: SnapshotStore) -> None:
    life = Restless(snapshot_store, clamp_from_step_5_on, every=100, checkpoint_every_steps=5).run_to(9)
    assert [message.step for message in life.agent.sealed if message.wanted] == [6]
    assert page_of(snapshot_store).get("spoiled") == 1
    step, tracked = restored_from(snapshot_store)
    assert step == 6
    for mine, its in zip(tracked.state().tensors, life.states[6], strict=True):
        assert torch.equal(mine, its)
    life.snapshots.close()


@pytest.mark.usefixtures("busy_machine")
def test_what_copying_at_once_costs_counts_from_the_first_that_is_measured(
    snapshot_store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, cost_s = torch._foreach_copy_, 0.02

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(cost_s)
        original(*arguments, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", slow)
    life = Restless(snapshot_store, clamp_from_step_10_on).run_to(10)
    assert page_of(snapshot_store).get("taken") > 4 and not page_of(snapshot_store).get("spoiled")
    life.run_to(15)  # one is spoiled, then one into each slot is not like the next ones, then one is measured
    assert page_of(snapshot_store).get("cost_ns") >= 1e9 * cost_s, "not a mean with what copies cost before"
    life.snapshots.close()


# --- the end of a job whose state is on a device


def test_the_final_state_is_waited_for_until_it_has_arrived(
    snapshot_store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is simulated: see tests/support/simulated_device.py."""
    monkeypatch.setattr(copy_schedule, "CopyWork", DeviceWork)
    life = Life(snapshot_store, 1, checkpoint_at_end=True).run_to(6)
    expected = [tensor.clone() for tensor in life.tracked.state().tensors]
    DeviceWork.hold()
    ending = threading.Thread(target=life.snapshots.take_last, args=(6,))
    ending.start()
    ending.join(0.05)
    assert ending.is_alive() and 6 not in steps(snapshot_store)
    DeviceWork.release()
    ending.join(30.0)
    assert not ending.is_alive() and [one.step for one in life.agent.sealed if one.wanted] == [6]
    life.snapshots.close()
    step, tracked = restored_from(snapshot_store)
    assert step == 6
    for mine, its in zip(tracked.state().tensors, expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_a_copy_from_a_device_costs_what_the_update_on_the_device_waits_for_it(
    snapshot_store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """To the host the wait reads as nothing: each step would be copied, at a fifth of a second each."""
    monkeypatch.setattr(copy_schedule, "CopyWork", DeviceWork)
    monkeypatch.setattr(DeviceWork, "wait_s", wait_s)
    life = Life(snapshot_store, 1)
    for _ in range(12):  # each copy is over before the next: the first ones of a plan are not measured
        life.step()
        wait_for(lambda: life.snapshots.poll() or life.snapshots._copy is None)
    cost_s = page_of(snapshot_store).get("cost_ns") / 1e9
    assert cost_s >= wait_s / 2 if wait_s else cost_s < 0.1
    life.snapshots.close()


def test_a_final_state_that_cannot_be_kept_is_said(
    snapshot_store: SnapshotStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(snapshot_store, 1, checkpoint_at_end=True)
    refused = BuffersReady(directory="", size_bytes=0, why="none is left")
    monkeypatch.setattr(life.agent, "tell", lambda message: setattr(life.agent, "buffers_ready", refused))
    life.snapshots.take_last(1)
    assert "the final state, before step 1, is in no checkpoint: none is left" in caplog.text
    life.snapshots.close()
