"""Passing over a stretch: every other step has the samples it would have had, on every rank, also after a resume."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from holdfast.data.cursor import SKIPS_MAX, Skips
from holdfast.data.loader import Loader
from holdfast.data.sample_digest import batch_digest, planned_digests
from holdfast.data.sampler import Sampler
from holdfast.data.step_plan import LastBatch, make_plan
from holdfast.errors import UsageError

SIZE, BATCH = 53, 8
DATA = list(range(SIZE))


def loader(**changes: Any) -> Loader:
    settings: dict[str, Any] = {"global_batch_size": BATCH, "seed": 3, "rank": 0, "world_size": 1}
    return Loader(DATA, **(settings | changes))


def steps(data: Loader, count: int) -> list[list[int]]:
    found = []
    for _ in range(count):
        found.append([number for batch in data.step_batches() for number in batch.tolist()])
        data.commit_drawn()
    return found


def test_what_is_left_of_a_run_of_steps() -> None:
    skips = Skips()
    skips.add(range(3, 6), "")
    skips.add(range(5, 8), "")
    skips.add(range(12, 20), "")
    assert skips.remaining(range(15)) == [range(3), range(8, 12)]
    assert skips.remaining(range(4, 7)) == []
    assert [skips.following(step) for step in (2, 3, 7, 8)] == [2, 8, 8, 8]
    assert 6 in skips and 8 not in skips


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_steps_have_what_they_would_have_had(slots: int | None, num_workers: int) -> None:
    whole = steps(loader(slots=slots), 12)
    data = loader(slots=slots, num_workers=num_workers)
    found = steps(data, 2)
    assert data.skip(range(6), why="spike") == range(2, 6), "what was handed out is past"
    data.skip(range(9, 10))
    found += steps(data, 3)
    saved = data.state_dict()
    data.close()
    resumed = loader(slots=slots)
    resumed.load_state_dict(saved)
    found += steps(resumed, 2)
    assert found == [*whole[:2], *whole[6:9], *whole[10:12]]
    assert saved["skips"] == [[2, 6, "spike"], [9, 10, ""]]


def test_a_step_under_way_is_not_skipped() -> None:
    data = loader()
    batches = data.step_batches()
    next(batches)
    assert data.skip(range(3)) == range(1, 3)
    data.commit_drawn()
    assert data.step == 3
    with pytest.raises(UsageError, match="steps 0 to 2 were handed out already"):
        data.skip(range(3))


@pytest.mark.parametrize(
    ("last_batch", "samples", "expected"),
    [
        ("short", range(8, 16), range(1, 2)),
        ("short", range(9, 17), range(1, 3)),
        ("short", range(50, 54), range(6, 8)),
        ("drop", range(40, 54), range(5, 7)),
        ("drop", range(47, 53), range(5, 6)),
        ("across", range(50, 58), range(6, 8)),
    ],
)
def test_samples_are_rounded_to_steps(last_batch: LastBatch, samples: range, expected: range) -> None:
    assert loader(last_batch=last_batch).skip(samples=samples) == expected


def test_what_cannot_be_skipped_is_refused() -> None:
    data = loader()
    for wrong in ({}, {"steps": range(2), "samples": range(2)}, {"steps": range(3, 3)}, {"steps": range(0, 9, 2)}):
        with pytest.raises(UsageError):
            data.skip(**wrong)  # type: ignore[arg-type]
    for step in range(SKIPS_MAX):
        data.skip(range(2 * step + 1, 2 * step + 2))
    with pytest.raises(UsageError, match="leave such samples out"):
        data.skip(range(10**6, 10**6 + 1))


def test_an_epoch_of_the_loader_and_of_the_sampler_pass_over_it() -> None:
    whole = steps(loader(), 7)
    data = loader()
    data.skip(range(2, 4))
    seen = []
    for batch in data:
        seen.append(batch.tolist())
        data.commit()
    assert seen == [*whole[:2], *whole[4:7]] and data.epoch == 1
    sampler = Sampler(SIZE, global_batch_size=BATCH, seed=3, rank=0, world_size=1)
    sampler.skip(range(2, 4))
    found = []
    for batch in DataLoader(DATA, batch_sampler=sampler):  # type: ignore[arg-type]
        found.append(batch.tolist())
        sampler.commit()
    assert found == seen
    assert (sampler.step, sampler.epoch) == (7, 1)


def test_a_sampler_in_the_middle_of_a_pass_refuses() -> None:
    sampler = Sampler(SIZE, global_batch_size=BATCH, seed=3, rank=0, world_size=1)
    passing = iter(sampler)
    next(passing)
    with pytest.raises(UsageError, match="fetched ahead"):
        sampler.skip(range(4, 5))


# --- digests of batches


@pytest.mark.parametrize("last_batch", ["short", "across", "drop"])
def test_what_ranks_were_handed_adds_up_to_the_plan(last_batch: LastBatch) -> None:
    counts = totals = 0

    class Watcher:
        def begin(self, step: int) -> None:
            pass

        def add(self, count: int, total: int) -> None:
            nonlocal counts, totals
            counts, totals = counts + count, (totals + total) % 2**128

    plan = make_plan(SIZE, global_batch_size=BATCH, seed=3, last_batch=last_batch)
    world = [loader(last_batch=last_batch, rank=rank, world_size=7, slots=4) for rank in range(7)]
    for step, count, total in planned_digests(plan, range(20)):
        counts = totals = 0
        for data in world:
            data.watcher = Watcher()
            steps(data, 1)
        assert (counts, totals) == (count, total), f"step {step}: ghosts do not count"


def test_a_digest_knows_epoch_and_repetition_but_no_order() -> None:
    assert batch_digest([(0, [1, 2, 3])]) == batch_digest([(0, [3]), (0, [2, 1])])
    others = [
        batch_digest([(1, [1, 2, 3])]),
        batch_digest([(0, [1, 2, 2])]),
        batch_digest([(0, [1, 2])]),
        batch_digest([(0, [1, 2, 4])]),
    ]
    assert batch_digest([(0, [1, 2, 3])]) not in others and len(set(others)) == 4
    assert batch_digest([(0, [1, 2, 3]), (7, [10**15])]) == (4, 38340040505671440642391919256541985491), "golden"
