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

from devices import DeviceWork
from holdfast.agent.memory.vault import Vault
from holdfast.errors import CheckpointError
from holdfast.state import copier
from holdfast.state.tracked import Tracked
from holdfast.storage.image import block_checksums
from holdfast.wire.session import HeldImage, NeedRoom, Room, Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.wire.slots import ImageLock, Seat, Status, Wanted
from holdfast.worker.collectives.talk import outside
from holdfast.worker.memory import owners
from holdfast.worker.memory.recalling import Choice, Key, Offer, Recollection, choose
from holdfast.worker.memory.snapshots import Cut, Snapshots


class Agent:
    """Makes room at once, and remembers what it was told."""

    def __init__(self, vault: Vault) -> None:
        self.vault, self.room, self.sealed = vault, None, []
        self.room: Room | None
        self.sealed: list[Sealed]

    def tell(self, message: NeedRoom | Sealed) -> None:
        if isinstance(message, NeedRoom):
            self.room = asyncio.run(self.vault.grant(0, message.size_bytes))
        else:
            self.sealed.append(message)


class Life:
    """A worker from its start to its death."""

    def __init__(
        self, vault: Vault, view: int, first: int = 0, known_whole: int = -1, every: int = 1, **more: int
    ) -> None:
        torch.manual_seed(view)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tracked = Tracked(model=self.model, optimizer=self.optimizer)
        self.agent = Agent(vault)
        self.snapshots = Snapshots(self.agent, self.tracked, Settings(every=every, **more))
        self.snapshots.start_from(known_whole)
        self.snapshots.enter(Cut(1, 1, 0), view, 3, first, 1)
        self.next = first
        self.states: dict[int, list[torch.Tensor]] = {}

    def step(self, has: bool = True) -> None:
        """As the engine does it, alone in the world. `has`: whether the others have the last one too."""
        self.states[self.next] = [tensor.clone() for tensor in self.tracked.state().tensors]
        self.snapshots.begin(self.next)
        self.body()
        self.model(torch.randn(4, 8)).sum().backward()
        self.snapshots.join(self.optimizer)
        words = list(self.snapshots.words(self.next))
        self.snapshots.agreed(self.next, words if has else [0, *words[1:]])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.snapshots.poll()
        self.next += 1
        self.snapshots.finish_moving()

    def body(self) -> None:
        """What else it does in a step."""

    def run_to(self, step: int, **choices: bool) -> Self:
        while self.next < step:
            self.step(**choices)
        return self


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    made = Vault(tmp_path, "node-0")
    made.open("job")
    yield made
    made.close()


def seat(vault: Vault) -> Seat:
    found = vault._seats.get(0)
    assert found is not None
    return found


def steps(vault: Vault) -> list[int]:
    return sorted(kept.record.step for kept in vault.kept())


def recalled(vault: Vault, at_least: int = 0, held: tuple[HeldImage, ...] | None = None) -> tuple[int, Tracked]:
    model = torch.nn.Linear(8, 8)
    tracked = Tracked(model=model, optimizer=torch.optim.Adam(model.parameters()))
    memory = Recollection(vault.held() if held is None else held, 0, 1, 1, tracked, outside())
    if (found := memory.load(at_least)) is None:
        memory.raise_refused()
    return (found.step if found is not None else -1), tracked


def test_two_images_follow_each_other(vault: Vault) -> None:
    life = Life(vault, 1).run_to(10)
    assert steps(vault) == [8, 9] and seat(vault).get("whole") == 9
    assert [message.step for message in life.agent.sealed] == sorted(message.step for message in life.agent.sealed)
    step, tracked = recalled(vault)
    assert step == 9
    for mine, its in zip(tracked.state().tensors, life.states[9], strict=True):
        assert torch.equal(mine, its)
    life.snapshots.close()


@pytest.mark.parametrize(("after", "left"), [(9, [8, 9]), (8, [8]), (-1, [])])
def test_images_of_what_may_be_wrong_are_given_up_and_others_follow(vault: Vault, after: int, left: list[int]) -> None:
    life = Life(vault, 1).run_to(10)
    life.snapshots.distrust(after)
    assert steps(vault) == left and recalled(vault)[0] == max(left, default=-1)
    life.run_to(13)
    assert recalled(vault)[0] == 12
    life.snapshots.close()


def test_what_is_whole_everywhere_is_kept_while_the_others_lag(vault: Vault) -> None:
    """Step 6 is the last one that all have: whatever is copied later goes into the other slot."""
    life = Life(vault, 1).run_to(7)
    whole = seat(vault).get("whole")
    for _ in range(4):
        life.step(has=False)
        assert whole in steps(vault) and seat(vault).get("whole") == whole
    assert steps(vault) == [whole, 10]
    life.snapshots.close()


def test_the_step_that_all_have_started_from_is_not_overwritten_first(vault: Vault) -> None:
    """At the death 9 was there, and only 8 known to be whole everywhere. All start from 9: then 8 gives way."""
    life = Life(vault, 1).run_to(9)
    life.step(has=False)
    assert (steps(vault), seat(vault).get("whole")) == ([8, 9], 8)
    life.snapshots.close()
    again = Life(vault, 2, first=9, known_whole=9).run_to(14, has=False)
    assert 9 in steps(vault) and 8 not in steps(vault) and seat(vault).get("whole") == 9
    again.snapshots.close()


def test_a_checkpoint_that_a_dead_worker_asked_for_blocks_no_slot(vault: Vault) -> None:
    life = Life(vault, 1, checkpoint_every_steps=4).run_to(6)
    wanted = [kept for kept in vault.kept() if kept.record.wanted == Wanted.YES]
    assert [kept.record.step for kept in wanted] == [4], "it is kept for the agent, which has not begun to read"
    life.run_to(8)
    assert 4 in steps(vault)
    life.snapshots.close()
    again = Life(vault, 2, first=7, known_whole=7).run_to(12)
    assert steps(vault) == [10, 11]
    again.snapshots.close()


def test_a_checkpoint_that_was_due_when_no_slot_was_free_is_made_up_for(vault: Vault) -> None:
    life = Life(vault, 1, every=100, checkpoint_every_steps=5).run_to(4)
    readers = []
    for number in range(2):
        readers.append(ImageLock(seat(vault).path(number), is_writable=False))
        assert readers[-1].take()
    life.run_to(7)
    assert not [message for message in life.agent.sealed if message.wanted]
    for reader in readers:
        reader.close()
    life.run_to(10)
    assert [message.step for message in life.agent.sealed if message.wanted] == [8]
    life.snapshots.close()


def test_a_torn_image_is_nothing(vault: Vault) -> None:
    life = Life(vault, 1).run_to(8)
    slot = next(kept.slot for kept in vault.kept() if kept.record.step == 7)
    record = seat(vault).record(slot)
    seat(vault).write(slot, record._replace(status=Status.WRITING))
    assert recalled(vault)[0] == 6 and recalled(vault, at_least=7)[0] == -1
    life.snapshots.close()


def test_where_faults_are_frequent_copies_are_too(vault: Vault) -> None:
    life = Life(vault, 1, every=0).run_to(3)
    life.snapshots._step_s, life.snapshots._stall_s = 1.0, 20.0
    seldom = life.snapshots.words(3)[2]
    life.snapshots.faults_per_node_day = 100.0
    assert 1 < life.snapshots.words(3)[2] < seldom
    life.snapshots.close()


# --- the recall


def test_a_damaged_image_gives_way_to_the_one_before(vault: Vault) -> None:
    life = Life(vault, 1).run_to(8)
    newest = vault.kept()[0]
    content = bytearray(seat(vault).path(newest.slot).read_bytes()[: newest.record.size_bytes])
    vault.note_checksums(newest, block_checksums(memoryview(bytes(content))))
    content[len(content) // 2] ^= 1
    seat(vault).path(newest.slot).write_bytes(content)
    step, tracked = recalled(vault)
    assert step == 6
    for mine, its in zip(tracked.state().tensors, life.states[6], strict=True):
        assert torch.equal(mine, its)
    with pytest.raises(CheckpointError, match="step 7 in memory"):
        recalled(vault, at_least=7)
    life.snapshots.close()


def test_an_image_that_was_overwritten_meanwhile_is_not_taken_for_the_other(vault: Vault) -> None:
    """A worker of an agent that was killed lived on for a moment."""
    life = Life(vault, 1).run_to(8)
    held = vault.held()
    life.run_to(10)
    with pytest.raises(CheckpointError, match="is being overwritten"):
        recalled(vault, held=held)
    life.snapshots.close()


def offer(step: int, part: int, view: int = 1, shards: int = 1, shares: int = 2) -> Offer:
    return Offer(step, part, shards, shares, 100, 3, 0, view)


def test_the_choice() -> None:
    rows = [[offer(9, 0), offer(8, 0)], [offer(8, 1)]]
    assert choose(rows, 0) == Choice(Key(8, 1, 2, 1), 3, 0, {0: (0, 100), 1: (1, 100)}, {0, 1})
    assert choose(rows, 8) == choose(rows, 0) and choose(rows, 9) is None and choose(rows, 0, [Key(8, 1, 2, 1)]) is None
    assert choose([[offer(9, 0, view=1)], [offer(9, 1, view=2)]], 0) is None, "two histories are no state"
    both = [[offer(9, 0), offer(9, 0, view=4, shares=1)], [offer(9, 1)]]
    chosen = choose(both, 0)
    assert chosen is not None and chosen.key.view == 4
    held = [[offer(9, 0), offer(9, 1)._replace(is_guest=1)]]
    chosen = choose(held, 0)
    assert chosen is not None and not chosen.is_intact, "the node that has made part 1 has lost it"
    chosen = choose([*held, [offer(9, 1)]], 0)
    assert chosen is not None and chosen.is_intact


# --- what changes otherwise than by an update


class Restless(Life):
    """Changes parameters in the body of its steps, before the thread has come to copy them."""

    def __init__(self, vault: Vault, changes: Callable[[Restless], None], **more: int) -> None:
        super().__init__(vault, 1, **more)
        self.changes = changes

    def body(self) -> None:
        with torch.no_grad():
            self.changes(self)


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread never gets a processor: an update copies what is its own, and not before."""
    monkeypatch.setattr(copier, "THREAD_WORTH_BYTES", 0)
    monkeypatch.setattr(copier.Copy, "work_off", lambda self: None)


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
    vault: Vault, changes: Callable[[Restless], None], spoiled_max: int, caplog: pytest.LogCaptureFixture
) -> None:
    life = Restless(vault, changes).run_to(20)
    assert 1 <= seat(vault).get("spoiled") <= spoiled_max
    assert "was changed in the body of the step" in caplog.text and len(caplog.records) == 1
    step, tracked = recalled(vault)
    assert (step, seat(vault).get("whole")) == (19, 19)
    for mine, its in zip(tracked.state().tensors, life.states[19], strict=True):
        assert torch.equal(mine, its)
    life.snapshots.close()


@pytest.mark.usefixtures("busy_machine")
def test_a_checkpoint_that_was_spoiled_is_made_with_the_next_step(vault: Vault) -> None:
    life = Restless(vault, clamp_from_step_5_on, every=100, checkpoint_every_steps=5).run_to(9)
    assert [message.step for message in life.agent.sealed if message.wanted] == [6]
    assert seat(vault).get("spoiled") == 1
    step, tracked = recalled(vault)
    assert step == 6
    for mine, its in zip(tracked.state().tensors, life.states[6], strict=True):
        assert torch.equal(mine, its)
    life.snapshots.close()


@pytest.mark.usefixtures("busy_machine")
def test_what_copying_at_once_costs_counts_from_the_first_that_is_measured(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, cost_s = torch._foreach_copy_, 0.02

    def slow(*arguments: Any) -> None:
        time.sleep(cost_s)
        original(*arguments)

    monkeypatch.setattr(torch, "_foreach_copy_", slow)
    life = Restless(vault, clamp_from_step_10_on).run_to(10)
    assert seat(vault).get("taken") > 4 and not seat(vault).get("spoiled")
    life.run_to(15)  # one is spoiled, then one into each slot is not like the next ones, then one is measured
    assert seat(vault).get("cost_ns") >= 1e9 * cost_s, "not a mean with what copies cost before"
    life.snapshots.close()


# --- the end of a job whose state is on a device


def test_the_final_state_is_waited_for_until_it_has_arrived(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is simulated: see tests/devices.py."""
    monkeypatch.setattr(owners, "Work", DeviceWork)
    life = Life(vault, 1, checkpoint_at_end=True).run_to(6)
    expected = [tensor.clone() for tensor in life.tracked.state().tensors]
    DeviceWork.hold()
    ending = threading.Thread(target=life.snapshots.take_last, args=(6,))
    ending.start()
    ending.join(0.05)
    assert ending.is_alive() and 6 not in steps(vault)
    DeviceWork.release()
    ending.join(30.0)
    assert not ending.is_alive() and [one.step for one in life.agent.sealed if one.wanted] == [6]
    life.snapshots.close()
    step, tracked = recalled(vault)
    assert step == 6
    for mine, its in zip(tracked.state().tensors, expected, strict=True):
        assert torch.equal(mine, its)


def test_a_final_state_that_cannot_be_kept_is_said(vault: Vault, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(vault, 1, checkpoint_at_end=True)
    life.agent.tell = lambda message: setattr(life.agent, "room", Room(directory="", size_bytes=0, why="none is left"))  # type: ignore[method-assign]
    life.snapshots.take_last(1)
    assert "the final state, before step 1, is in no checkpoint: none is left" in caplog.text
    life.snapshots.close()
