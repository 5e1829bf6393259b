"""What was fetched ahead is kept when the place changes or a step is repeated: the dataset counts its own reads."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import holdfast as hf

SIZE, BATCH, SLOTS = 203, 24, 12
WORKERS, PREFETCH_FACTOR = 2, 2
AHEAD = WORKERS * PREFETCH_FACTOR


class Counted(Dataset[Any]):
    """Writes down each read, whichever process it is in."""

    def __init__(self, directory: Path) -> None:
        self.log = os.open(directory / "reads", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.path = directory / "reads"

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, sample: int) -> torch.Tensor:
        os.write(self.log, f"{sample}\n".encode())
        return torch.tensor([sample, sample])

    def reads(self) -> Counter[int]:
        return Counter(map(int, self.path.read_text().split()))


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[Any]:
    counted = Counted(tmp_path)
    yield counted
    os.close(counted.log)


def make(dataset: Any, *, workers: int = WORKERS, rank: int = 0, world_size: int = 1, **changes: Any) -> Any:
    settings = {"global_batch_size": BATCH, "seed": 2, "slots": SLOTS, "seed_samples": False}
    ahead = {"prefetch_factor": PREFETCH_FACTOR} if workers else {}
    return hf.Loader(dataset, rank=rank, world_size=world_size, num_workers=workers, **(settings | ahead | changes))


def trained(loader: Any) -> list[list[int]]:
    """A step, slot by slot."""
    found = [batch[:, 0].tolist() for batch in loader.step_batches()]
    loader.commit()
    return found


def flat(batches: Any) -> Any:
    return list(itertools.chain.from_iterable(batches))


def wanted(loader: Any, step: int) -> list[int]:
    share = loader.plan.share(step, loader.rank, loader.world_size, loader.weights)
    return loader.plan.order.samples_at(share).tolist()


def test_slots_that_stay_here_are_not_fetched_again(dataset: Any) -> None:
    """4 ranks become 3: rank 0 had slots 0 to 2 and has 0 to 3."""
    loader = make(dataset, world_size=4)
    used = trained(loader)
    loader.set_assignment(0, 3)
    for step in (1, 2, 3):
        assert flat(trained(loader)) == wanted(loader, step)
    loader.close()
    reads = dataset.reads()
    assert len(used) == 3
    assert max(reads.values()) == 1, "what was there was kept"


def test_slots_that_went_away_are_let_go_and_nothing_else(dataset: Any) -> None:
    """2 ranks become 4: rank 1 had slots 6 to 11 and has 3 to 5, none of them its own; then 2 again."""
    loader = make(dataset, rank=1, world_size=2)
    steps = [trained(loader)]
    loader.set_assignment(1, 4)
    steps.append(trained(loader))
    loader.set_assignment(1, 2)
    steps += [trained(loader), trained(loader)]
    loader.close()
    for step, place in enumerate([(1, 2), (1, 4), (1, 2), (1, 2)]):
        assert flat(steps[step]) == loader.plan.order.samples_at(loader.plan.share(step, *place)).tolist()
    assert max(dataset.reads().values()) == 1, "of each step other slots, so nothing is read twice"


def test_weights_move_slots_and_keep_the_rest(dataset: Any) -> None:
    loader = make(dataset, world_size=2)
    trained(loader)
    loader.set_assignment(0, 2, weights=[0.5, 1.0])
    for step in (1, 2, 3):
        assert flat(trained(loader)) == wanted(loader, step)
    loader.close()
    assert max(dataset.reads().values()) == 1


@pytest.mark.parametrize("slots", [SLOTS, None])
@pytest.mark.parametrize("workers", [0, WORKERS])
def test_a_repeated_step_reads_nothing_again(dataset: Any, slots: int, workers: int) -> None:
    loader = make(dataset, workers=workers, slots=slots, world_size=2)
    state = loader.state_dict()
    for broken_after in (1, 3, 6):
        batches = loader.step_batches()
        taken = [next(batches, None) for _ in range(broken_after)]
        assert taken[0] is not None
        loader.load_state_dict(state)  # as a session undoes a step
        loader.set_assignment(0, 2)
    for step in (0, 1):
        assert flat(trained(loader)) == wanted(loader, step)
    loader.close()
    assert max(dataset.reads().values()) == 1


def test_a_step_that_broke_and_goes_on_in_a_smaller_world_keeps_what_was_handed_out(dataset: Any) -> None:
    loader = make(dataset, world_size=3)
    batches = loader.step_batches()
    for _ in range(3):
        next(batches)
    loader.set_assignment(0, 2)
    for step in (0, 1, 2):
        assert flat(trained(loader)) == wanted(loader, step)
    loader.close()
    assert max(dataset.reads().values()) == 1


def test_places_that_change_one_after_the_other_in_the_middle_of_a_step_keep_all_that_came(dataset: Any) -> None:
    """Slots 3 to 5, then from 2 on, of which some are handed out and some came early, then from 1 on."""
    loader = make(dataset, rank=1, world_size=4)
    trained(loader)
    for first in (2, 1):
        loader.set_assignment(1, 2, weights=[first, SLOTS - first])
        batches = loader.step_batches()
        for _ in range(2):
            next(batches)
    for step in (1, 2):
        assert flat(trained(loader)) == wanted(loader, step)
    loader.close()
    assert max(dataset.reads().values()) == 1


@pytest.mark.parametrize("change", ["in_place", "gradient", "view"])
def test_a_batch_that_was_changed_is_fetched_again(dataset: Any, change: str) -> None:
    loader = make(dataset, world_size=2, slots=None, collate_fn=lambda items: {"x": torch.stack(items).float()})
    first = next(iter(loader.step_batches()))
    whole = first["x"].tolist()
    if change == "in_place":
        first["x"] /= 255
    elif change == "view":
        first["x"][0].zero_()
    else:
        first["x"].requires_grad_().sum().backward()
    again = next(iter(loader.step_batches()))
    assert again["x"].tolist() == whole and not again["x"].requires_grad
    del again["x"]
    assert next(iter(loader.step_batches()))["x"].tolist() == whole, "the dictionary is another one each time"
    loader.commit()
    assert next(iter(loader.step_batches()))["x"][:, 0].tolist() == wanted(loader, 1), "and the place was not lost"
    loader.close()
    assert set(dataset.reads().values()) == {1, 2}


def test_a_batch_whose_changes_cannot_be_seen_is_fetched_again(dataset: Any) -> None:
    loader = make(dataset, workers=0, slots=None, collate_fn=lambda items: torch.stack(items).numpy())
    first = next(iter(loader.step_batches()))
    whole = first.tolist()
    first[:] = 0
    assert next(iter(loader.step_batches())).tolist() == whole


def test_the_number_of_cached_answers_is_bounded(dataset: Any) -> None:
    """However often the place changes to and fro, memory does not grow."""
    loader = make(dataset, rank=1, world_size=2)
    state = loader.state_dict()
    for step in range(30, 0, -1):
        loader.load_state_dict(loader.plan.state(step))
        next(iter(loader.step_batches()))
        assert len(loader._pipeline._early) <= 4 * AHEAD and len(loader._pipeline._in_flight) <= AHEAD
    loader.load_state_dict(state)
    assert flat(trained(loader)) == wanted(loader, 0)
    loader.close()


class Fails(Counted):
    """Some samples cannot be read, once."""

    def __init__(self, directory: Path, bad: set[int]) -> None:
        super().__init__(directory)
        self.directory, self.bad = directory, bad

    def __getitem__(self, sample: int) -> torch.Tensor:
        if sample in self.bad and not (self.directory / f"failed-{sample}").exists():
            (self.directory / f"failed-{sample}").touch()
            raise LookupError(f"sample {sample} is not there")
        return super().__getitem__(sample)


def test_an_error_belongs_to_its_batch(tmp_path: Path) -> None:
    """One that was fetched ahead for another view is nobody's; one that is wanted is raised, and can be tried again."""
    plan = make(range(SIZE), workers=0).plan
    nobodys, ours = (int(plan.order.samples_at(plan.slot_share(1, range(slot, slot + 1)))[0]) for slot in (5, 1))
    dataset = Fails(tmp_path, {nobodys, ours})
    loader = make(dataset, world_size=2, workers=2, prefetch_factor=6)
    trained(loader)
    loader.set_assignment(0, 3)
    with pytest.raises(LookupError, match=f"sample {ours} is not there"):
        trained(loader)
    for step in (1, 2):
        assert flat(trained(loader)) == wanted(loader, step)
    assert (tmp_path / f"failed-{nobodys}").exists()
    loader.close()
    os.close(dataset.log)


def test_a_worker_that_died_is_replaced_when_the_step_is_repeated(dataset: Any) -> None:
    loader = make(dataset, world_size=2)
    trained(loader)
    next(loader.step_batches())
    pid = loader._pipeline._loader._iterator._workers[0].pid
    with pytest.raises(RuntimeError, match="DataLoader worker"):  # torch's own, from its handler of SIGCHLD
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        for _ in range(AHEAD):
            trained(loader)
    step = loader.step
    for later in (step, step + 1):
        assert flat(trained(loader)) == wanted(loader, later)
    loader.close()


lives = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["place", "undo", "back"])),
    min_size=1,
    max_size=10,
)


@settings(max_examples=40, deadline=None)
@given(lives, st.sampled_from([0, 1]), st.sampled_from([SLOTS, None]), st.sampled_from(["short", "across", "drop"]))
def test_whatever_happens_each_batch_is_the_plan_s(schedule: Any, workers: int, slots: int, last_batch: str) -> None:
    """Places change, steps break after some batches, the position goes back: in any order."""
    loader = make([torch.tensor([n, n]) for n in range(53)], workers=workers, slots=slots, last_batch=last_batch)
    try:
        for world_size, steps, broken_after, fault in schedule:
            loader.set_assignment(steps % world_size, world_size)
            for _ in range(steps):
                step = loader.step
                assert flat(trained(loader)) == wanted(loader, step) or not wanted(loader, step), "but for ghosts"
            batches = loader.step_batches()
            for _ in range(broken_after):
                next(batches, None)
            if fault == "back":
                loader.load_state_dict(loader.plan.state(max(0, loader.step - 2)))
            elif fault == "place":
                loader.set_assignment(0, world_size + 1)
        step = loader.step
        assert flat(trained(loader)) == wanted(loader, step) or not wanted(loader, step), "but for ghosts"
    finally:
        loader.close()
