"""The sampler with torch's own DataLoader: what it deals out, what it remembers, what it refuses."""

import itertools
import json
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import holdfast as hf
from holdfast.data.sample_digest import chain, planned_chain
from holdfast.errors import UsageError


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> Any:
        return torch.tensor(sample)


def world(size: int, world_size: int, **settings: Any) -> Any:
    return [hf.Sampler(size, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def train(samplers: Any, steps: Any, committed: Any, states: Any) -> None:
    """A pass of at most so many committed steps: their samples and the states after them."""
    for batches in itertools.islice(zip(*samplers, strict=True), steps):
        used = [s for sampler, batch in zip(samplers, batches, strict=True) if sampler.loss_scale for s in batch]
        committed.append((samplers[0].step, used))
        for sampler in samplers:
            sampler.commit()
        states.append(samplers[0].state_dict())


schedules = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(), st.sampled_from(["short", "across"]), schedules)
def test_kills_shrinks_grows_and_resumes_leave_the_history_as_it_would_have_been(
    size: int, batch: int, seed: int, last: str, schedule: Any
) -> None:
    """Each life: (world size, steps committed, of which the last so many are lost with the fault)."""
    configuration = {"global_batch_size": batch, "seed": seed, "last_batch": last}
    committed: list[Any] = []
    state, saved = None, 0
    for world_size, steps, lost in schedule:
        samplers = world(size, world_size, **configuration)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        states = [samplers[0].state_dict()]
        end = samplers[0].step + steps
        while samplers[0].step < end:
            train(samplers, end - samplers[0].step, committed, states)
        kept = max(0, steps - lost)
        state, saved = json.loads(json.dumps(states[kept])), saved + kept
        del committed[saved:]
    assert [step for step, _ in committed] == list(range(saved))
    plan = samplers[0].plan
    assert chain(committed) == planned_chain(plan, 0, saved)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0), (1, 2)])
def test_prefetched_batches_are_not_counted_and_worker_counts_may_change(first: int, second: int) -> None:
    whole = list(hf.Sampler(103, global_batch_size=8, seed=1, rank=0, world_size=1))
    sampler = hf.Sampler(103, global_batch_size=8, seed=1, rank=0, world_size=1)
    loader = DataLoader(Numbers(103), batch_sampler=sampler, num_workers=first, persistent_workers=first > 0)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        sampler.commit()
        if sampler.step == 5:
            break
    resumed = hf.Sampler(103, global_batch_size=8, seed=1, rank=0, world_size=1)
    resumed.load_state_dict(sampler.state_dict())
    del loader
    for batch in DataLoader(
        Numbers(103), batch_sampler=resumed, num_workers=second, prefetch_factor=4 if second else None
    ):
        seen.append(batch.tolist())
        resumed.commit()
    assert seen == whole
    assert (resumed.epoch, resumed.position) == (1, 103)


def test_persistent_workers_go_through_epochs() -> None:
    sampler = hf.Sampler(10, global_batch_size=4, rank=0, world_size=1)
    loader = DataLoader(Numbers(10), batch_sampler=sampler, num_workers=1, persistent_workers=True)
    epochs: list[Any] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(loader) == 3
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch.tolist()
            sampler.commit()
    assert all(sorted(samples) == list(range(10)) for samples in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_every_rank_has_every_step_and_ghosts_weigh_nothing() -> None:
    samplers = world(10, 4, global_batch_size=8)
    batches = [list(sampler) for sampler in samplers]
    assert [len(own) for own in batches] == [2, 2, 2, 2]
    for sampler in samplers:
        sampler.commit()
    assert [sampler.loss_scale for sampler in samplers] == [0.0, 2.0, 0.0, 2.0]
    ghosts = [own[1] for own in batches if own[1]]
    assert all(len(own) == 1 for own in ghosts)


def test_an_epoch_loop_from_zero_continues_in_the_middle() -> None:
    sampler = hf.Sampler(10, global_batch_size=4, rank=0, world_size=1)
    sampler.load_state_dict(hf.Sampler(10, global_batch_size=4, rank=0, world_size=1).plan.state(4))
    lengths = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        lengths.append(0)
        for _ in sampler:
            lengths[-1] += 1
            sampler.commit()
    assert lengths == [0, 2, 3]


def test_a_share_given_by_rank_keeps_the_global_batch_when_the_world_changes() -> None:
    four = hf.Sampler(100, batch_size=4, rank=0, world_size=4)
    two = hf.Sampler(100, batch_size=4, rank=0, world_size=2)
    two.load_state_dict(four.state_dict())
    assert two.plan.global_batch_size == 16
    assert len(next(iter(two))) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 101}, "number of samples is 101 here and was 100"),
        ({"seed": 1}, "the seed"),
        ({"global_batch_size": 5}, "global batch size"),
        ({"shuffle": False}, "shuffle"),
        ({"last_batch": "across"}, "last_batch"),
        ({"fingerprint": "b"}, "fingerprint"),
    ],
)
def test_a_state_of_another_plan_is_refused(change: Any, words: str) -> None:
    here: dict[str, Any] = {"size": 100, "seed": 0, "global_batch_size": 10, "shuffle": True}
    here |= {"last_batch": "short", "fingerprint": "a"}
    state = hf.Sampler(here.pop("size"), rank=0, world_size=1, **here).state_dict()
    changed = here | change
    with pytest.raises(UsageError, match=words):
        hf.Sampler(changed.pop("size", 100), rank=0, world_size=1, **changed).load_state_dict(state)


def test_states_that_are_none_are_refused() -> None:
    sampler = hf.Sampler(100, global_batch_size=10, rank=0, world_size=1)
    for state in ({}, sampler.state_dict() | {"position": 3}, sampler.state_dict() | {"position": -10}):
        with pytest.raises(UsageError):
            sampler.load_state_dict(state)


def test_a_state_is_small_and_far_ones_are_as_cheap() -> None:
    sampler = hf.Sampler(10**12, global_batch_size=1000, rank=0, world_size=1)
    sampler.load_state_dict(sampler.state_dict() | {"position": 10**9})
    assert len(json.dumps(sampler.state_dict())) < 200
    assert len(next(iter(sampler))) == 1000


def test_commits_need_batches() -> None:
    sampler = hf.Sampler(100, global_batch_size=10, rank=0, world_size=1)
    with pytest.raises(UsageError, match="commit once for each batch"):
        sampler.commit()


def test_a_warning_names_forgotten_commits() -> None:
    sampler = hf.Sampler(20, global_batch_size=10, rank=0, world_size=1)
    assert len(list(sampler)) == 2
    with pytest.warns(UserWarning, match="call commit"):
        sampler.set_epoch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in sampler:
            sampler.commit()
        sampler.set_epoch(2)


def test_rank_and_world_size_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert hf.Sampler(9, batch_size=1).plan.global_batch_size == 3
    with pytest.raises(UsageError, match="both rank and world_size"):
        hf.Sampler(9, batch_size=1, rank=0)
    with pytest.raises(UsageError, match="either batch_size"):
        hf.Sampler(9)
    with pytest.raises(UsageError, match="has no length"):
        hf.Sampler(iter([1]), batch_size=1)


def test_the_package_imports_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, holdfast; assert 'torch' not in sys.modules; holdfast.Sampler; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
