"""Documents packed inside a slot: each token once, no document sees another, the same at every world size."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.data.packing import NO_DOCUMENT, Packing, targets_of
from holdfast.data.token_files import IGNORED
from holdfast.errors import UsageError


def test_windows_of_a_slot() -> None:
    batch = Packing(window_tokens=5, padding=9)([[1, 2, 3], [11, 12, 13, 14], torch.tensor([21, 22]), [31]])
    assert batch["inputs"].tolist() == [[11, 12, 13, 1, 2], [21, 9, 9, 9, 9]]
    assert batch["targets"].tolist() == [[12, 13, 14, 2, 3], [22, *[IGNORED] * 4]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1], [0, *[NO_DOCUMENT] * 4]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert targets_of(batch) == 6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 12))
def test_every_pair_of_neighbours_is_there_once_and_no_other(lengths: list[int], window: int) -> None:
    documents = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    batch = Packing(window_tokens=window)(documents)
    predicted = batch["targets"] != IGNORED
    pairs = list(zip(batch["inputs"][predicted].tolist(), batch["targets"][predicted].tolist(), strict=True))
    assert sorted(pairs) == sorted((a, b) for document in documents for a, b in itertools.pairwise(document))
    assert torch.equal(predicted, batch["documents"] != NO_DOCUMENT)
    for row in range(len(predicted)):
        for number in range(int(batch["documents"][row].max()) + 1):
            own = batch["documents"][row] == number
            assert len({token // 1000 for token in batch["inputs"][row][own].tolist()}) == 1
            assert batch["positions"][row][own].tolist() == list(range(int(own.sum())))
    assert len(predicted) <= max(1, 2 * len(pairs) // window + 1), "no two windows are less than half full"


def test_a_slot_is_packed_alike_on_every_rank() -> None:
    documents = [list(range(100 * n, 100 * n + 3 + n * 7 % 23)) for n in range(64)]

    def slots(rank: int, world_size: int) -> Any:
        loader = hf.Loader(
            documents, global_batch_size=32, slots=8, seed=1, collate_fn=Packing(window_tokens=16),
            rank=rank, world_size=world_size,
        )  # fmt: skip
        return [{name: values.tolist() for name, values in batch.items()} for batch in loader.step_batches()]

    whole = slots(0, 1)
    assert len(whole) == 8
    for world_size in (2, 3):
        assert [batch for rank in range(world_size) for batch in slots(rank, world_size)] == whole


def test_windows_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="windows of 0 tokens"):
        Packing(window_tokens=0)
