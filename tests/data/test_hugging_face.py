"""Hugging Face's datasets (arrow, on disk) as a source: exact, and read many rows at once. Nothing is downloaded."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
datasets = pytest.importorskip("datasets")

import holdfast as hf
from holdfast.data.mixture import Mixture
from holdfast.errors import UsageError

ROWS, BATCH = 301, 16


def columns(rows: int = ROWS, first: int = 0) -> dict[str, Any]:
    numbers = range(first, first + rows)
    return {"number": list(numbers), "text": [f"row {n}" for n in numbers], "x": [[n, n / 2] for n in numbers]}


@pytest.fixture
def path(tmp_path: Path) -> str:
    datasets.Dataset.from_dict(columns()).save_to_disk(str(tmp_path / "arrow"), num_shards=3)
    return str(tmp_path / "arrow")


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


def make(dataset: Any, rank: int = 0, world_size: int = 1, **settings: Any) -> Any:
    settings = {"global_batch_size": BATCH, "seed": 4} | settings
    return hf.Loader(dataset, rank=rank, world_size=world_size, **settings)


def epoch_of(loader: Any) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(batch["number"].tolist())
        assert batch["text"] == [f"row {number}" for number in found[-1]]
        assert batch["x"][:, 1].tolist() == [number / 2 for number in found[-1]]
        loader.commit()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_once_and_resumed_by_another_world(path: str, workers: int) -> None:
    dataset = datasets.load_from_disk(path).with_format("torch")
    whole = make(dataset, num_workers=workers)
    found = epoch_of(whole)
    whole.close()
    assert found == [whole.plan.samples(step).tolist() for step in range(19)]
    halves = [make(datasets.load_from_disk(path).with_format("torch"), rank, 2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(whole.plan.state(7))
    assert [a + b for a, b in zip(*map(epoch_of, halves), strict=True)] == found[7:]


class Spied:
    """Counts how a dataset is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.calls: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        self.calls["one"] += 1
        return self.dataset[row]

    def __getitems__(self, rows: Any) -> Any:
        self.calls["many"] += 1
        return self.dataset.__getitems__(rows)


@pytest.mark.parametrize("seed_samples", [True, False])
def test_the_rows_of_a_batch_are_read_at_once(path: str, seed_samples: bool) -> None:
    spied = Spied(datasets.load_from_disk(path).with_format("torch"))
    epoch_of(make(spied, seed_samples=seed_samples))
    assert spied.calls == {"many": 19}


def jitter(row: Any) -> Any:
    return row | {"noise": torch.tensor(random.random()) + torch.rand(())}


def test_random_transforms_belong_to_the_row_although_rows_are_read_at_once(path: str) -> None:
    spied = Spied(datasets.load_from_disk(path).with_format("torch"))
    one = [batch["noise"].tolist() for batch in make(spied, transform=jitter)]
    halves = [make(spied, rank, 2, transform=jitter) for rank in range(2)]
    two = [a["noise"].tolist() + b["noise"].tolist() for a, b in zip(*halves, strict=True)]
    assert one == two and len({noise for step in one for noise in step}) == ROWS
    assert spied.calls["one"] == 0


def test_a_dataset_whose_own_transform_is_random_is_read_row_by_row(path: str) -> None:
    """Whatever is drawn while many rows are read could not be told apart by row."""

    def augment(rows: Any) -> Any:
        return rows | {"noise": [random.random() for _ in rows["number"]]}

    spied = Spied(datasets.load_from_disk(path).with_transform(augment))
    settings: dict[str, Any] = {"collate_fn": lambda rows: [row["noise"] for row in rows]}
    one = list(make(spied, **settings))
    halves = [make(spied, rank, 2, **settings) for rank in range(2)]
    assert one == [a + b for a, b in zip(*halves, strict=True)]
    assert spied.calls == {"many": 3, "one": 2 * ROWS}, "each of the loaders found out with its first batch"


def test_a_mixture_reads_each_source_at_once(path: str) -> None:
    web = Spied(datasets.load_from_disk(path).with_format("torch"))
    books = Spied(datasets.Dataset.from_dict(columns(50, first=1000)).with_format("torch"))
    mixture = Mixture([web, books], weights=[3, 1], draws=1024)
    loader = make(mixture, shuffle=False)
    found = [number for step in epoch_of(loader) for number in step]
    assert found == [mixture[draw]["number"] for draw in range(1024)]
    assert Counter(number >= 1000 for number in found) == {False: 768, True: 256}
    assert web.calls["many"] + books.calls["many"] <= 2 * 64


def test_another_version_of_the_dataset_is_refused(path: str, tmp_path: Path) -> None:
    state = make(datasets.load_from_disk(path), fingerprint="2026-11").state_dict()
    with pytest.raises(UsageError, match="the dataset's fingerprint is '2026-12' here and was '2026-11'"):
        make(datasets.load_from_disk(path), fingerprint="2026-12").load_state_dict(state)
    longer = datasets.concatenate_datasets([datasets.load_from_disk(path), datasets.Dataset.from_dict(columns(1))])
    with pytest.raises(UsageError, match="number of samples is 302 here and was 301"):
        make(longer, fingerprint="2026-11").load_state_dict(state)
