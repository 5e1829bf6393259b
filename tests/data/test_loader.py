"""The loader: batches by rank and by slot, randomness by sample, the same whatever the workers."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import holdfast as hf
from holdfast.data.randomness import sample_randomness, slot_randomness
from holdfast.errors import UsageError


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> Any:
        return torch.tensor(sample)


def jitter(sample: Any) -> Any:
    return sample + torch.rand(()) * 0.3 + np.random.rand() * 0.3 + random.random() * 0.3


def make(size: int = 50, rank: int = 0, world_size: int = 1, **settings: Any) -> Any:
    settings = {"global_batch_size": 8, "seed": 2} | settings
    return hf.Loader(Numbers(size), rank=rank, world_size=world_size, **settings)


def flat(lists: Any) -> Any:
    return list(itertools.chain.from_iterable(lists))


def samples_of(batches: Any) -> Any:
    return flat(batch.tolist() for batch in batches)


def epoch_of(loader: Any) -> Any:
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        loader.commit()
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_is_the_plan_s_and_epochs_follow_without_a_pause(num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    epochs = [epoch_of(loader), epoch_of(loader)]
    loader.close()
    assert flat(epochs) == [loader.plan.samples(step).tolist() for step in range(14)]


@pytest.mark.parametrize("first_workers", [0, 1])
def test_augmentation_belongs_to_the_sample(first_workers: int) -> None:
    reference = make(transform=jitter)
    wanted = epoch_of(reference) + epoch_of(reference)
    first = make(transform=jitter, num_workers=first_workers)
    found = []
    for batch in first:
        found.append(batch.tolist())
        first.commit()
        if first.step == 3:
            break
    first.close()
    halves = [make(transform=jitter, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(first.state_dict())
    while halves[0].step < 14:
        found += [a + b for a, b in zip(epoch_of(halves[0]), epoch_of(halves[1]), strict=True)]
    assert found == wanted
    assert sorted(map(int, flat(wanted[:7]))) == sorted(map(int, flat(wanted[7:]))), "same samples"
    assert sorted(flat(wanted[:7])) != sorted(flat(wanted[7:])), "another augmentation"


def test_the_loader_leaves_the_program_s_generators_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3).tolist()
    torch.manual_seed(5)
    loader = make(transform=jitter)
    next(iter(loader))
    assert torch.rand(3).tolist() == wanted


def test_slots_are_batches_and_a_new_view_has_others() -> None:
    loader = make(slots=4, world_size=2)
    step = loader.plan.samples(0).tolist()
    batches, scales, last = [], [], []
    for batch in loader.step_batches():
        batches.append(batch.tolist())
        scales.append(loader.loss_scale)
        last.append(loader.is_last_of_step)
    assert batches == [step[0:2], step[2:4]]
    assert scales == [0.5, 0.5] and last == [False, True]
    loader.commit()
    loader.set_assignment(0, 1)
    assert samples_of(loader.step_batches()) == loader.plan.samples(1).tolist()
    assert samples_of(loader.step_batches()) == loader.plan.samples(1).tolist(), "repeated"
    loader.commit()
    assert samples_of(loader.step_batches()) == loader.plan.samples(2).tolist()


def test_weights_that_do_not_help_are_not_used() -> None:
    loader = make(slots=4)
    assert loader.bearable(2, (1.0, 0.5)) == (1.0, 0.5)
    assert loader.bearable(2, ()) is None
    assert loader.bearable(3, (1.0, 1.0, 0.25)) is None, "the last would have nothing to do"
    loader.even_batches = True
    assert loader.bearable(2, (1.0, 0.5)) is None, "all make as many passes as the one with most"
    whole = make()  # one batch a rank, of whatever size
    whole.even_batches = True
    assert whole.bearable(2, (1.0, 0.5)) == (1.0, 0.5)


def test_shifted_shares_are_the_same_samples() -> None:
    loaders = [make(slots=4, rank=rank, world_size=2) for rank in range(2)]
    for rank, loader in enumerate(loaders):
        loader.set_assignment(rank, 2, loader.bearable(2, (1.0, 0.25)))
    found = [samples_of(loader.step_batches()) for loader in loaders]
    assert flat(found) == loaders[0].plan.samples(0).tolist()
    assert len(found[0]) == 3 * len(found[1])


def test_steps_are_prefetched_across_views_with_workers() -> None:
    loader = make(slots=4, num_workers=1)
    for step, place in enumerate([(0, 1), (0, 1), (1, 2), (1, 2), (0, 1)]):
        loader.set_assignment(*place)
        found = samples_of(loader.step_batches())
        assert found == loader.plan.order.samples_at(loader.plan.share(step, *place)).tolist()
        loader.commit()
    loader.close()


def test_ghosts_in_short_steps_by_slot() -> None:
    loaders = [make(size=10, slots=4, rank=rank, world_size=4) for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict(loader.plan.state(1))
    counts, total = [], []
    for loader in loaders:
        for batch in loader.step_batches():
            counts.append(len(batch))
            total.append(loader.loss_scale)
            assert loader.is_last_of_step
    assert counts == [1, 1, 1, 1]
    assert total == [0.0, 2.0, 0.0, 2.0]


def test_where_forwards_communicate_every_rank_has_as_many_batches() -> None:
    """Seven slots on three ranks, and ten samples: the second step has two, in slots 3 and 6."""
    loaders = [make(size=10, slots=7, rank=rank, world_size=3) for rank in range(3)]
    for step, wanted in enumerate([[(2, 1), (2, 1), (3, 0)], [(0, 1), (1, 0), (1, 0)]]):
        found = []
        for loader in loaders:
            loader.even_batches = True
            batches = []
            for batch in loader.step_batches():
                batches.append((batch.tolist(), loader.is_ghost, loader.is_last_of_step, loader.loss_scale))
            loader.commit()
            own = [samples for samples, is_ghost, _, _ in batches if not is_ghost]
            found.append((len(own), len(batches) - len(own)))
            assert [is_last for *_, is_last, _ in batches] == [False] * (len(batches) - 1) + [True]
            assert all(bool(scale) != is_ghost for _, is_ghost, _, scale in batches)
            share = loader.plan.order.samples_at(loader.plan.share(step, loader.rank, 3)).tolist()
            assert flat(own) == share
        assert found == wanted


def test_batches_can_be_weighed_by_what_is_in_them() -> None:
    loader = make(slots=4)
    found = [(sum(batch.tolist()), loader.loss_scale) for batch in loader.step_batches(weight=lambda b: b.sum())]
    total = sum(weight for weight, _ in found)
    assert [scale for _, scale in found] == [weight / total for weight, _ in found]


def shuffled(items: Any) -> Any:
    """As collators that mask tokens at random."""
    return torch.stack(items)[torch.randperm(len(items))] + random.random() / 2 + np.random.rand() / 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_collators_belong_to_the_slot(num_workers: int) -> None:
    whole = make(slots=4, collate_fn=shuffled)
    wanted = [batch.tolist() for batch in whole.step_batches()]
    halves = [make(slots=4, collate_fn=shuffled, rank=r, world_size=2, num_workers=num_workers) for r in range(2)]
    found = [batch.tolist() for half in halves for batch in half.step_batches()]
    for half in halves:
        half.close()
    assert found == wanted
    assert len({batch[0] % 1 for batch in wanted}) == 4, "each slot has numbers of its own"


def test_batches_that_cross_epochs_use_each_epoch_s_randomness() -> None:
    wanted = make(size=10, last_batch="across", transform=jitter)
    found = epoch_of(wanted)
    assert len(found[1]) == 8
    plan = wanted.plan
    sample = int(plan.order.samples_at(range(10, 11))[0])
    with sample_randomness(2, 1, sample):
        assert jitter(torch.tensor(sample)).item() == pytest.approx(found[1][2])


def test_options_that_are_the_plan_s_are_refused() -> None:
    with pytest.raises(UsageError, match="batch_size"):
        make(batch_size=3)


def test_keyed_randomness_is_put_back_and_depends_on_its_key() -> None:
    def draw() -> Any:
        return random.random(), np.random.rand(), torch.rand(()).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    inside = []
    for key in ((0, 0, 1), (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 2)):
        with slot_randomness(*key):
            inside.append(draw())
    with sample_randomness(0, 0, 1):
        inside.append(draw())
    assert draw() == wanted
    assert inside[0] == inside[1]
    assert len(set(inside)) == 5
