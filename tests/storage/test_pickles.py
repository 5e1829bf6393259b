"""What was written opens without us: torch.load, safetensors, torch.distributed.checkpoint and what builds on it."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.state.tensor_specs import DTYPES
from holdfast.storage.header import FORMAT_NAMES, ITEM_BYTES
from holdfast.storage.image import ImageLayout, plan
from holdfast.storage.pickles import dcp_metadata
from support.small_images import image_of, region

SHAPES: list[tuple[int, ...]] = [(), (3, 5), (0, 2), (7, 1, 2)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that it is alone, of half complex numbers, and of its own way to look at storages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def view(layout: ImageLayout, image: bytearray, number: int) -> torch.Tensor:
    entry = layout.entries[number]
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    held = torch.frombuffer(image, dtype=torch.uint8)[entry.start : entry.end]
    return held.view(DTYPES[entry.dtype]).view(entry.shape)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    as_bytes = [held.contiguous().reshape(-1).view(torch.uint8) for held in (one, other)]
    return kind and torch.equal(*as_bytes)


def test_the_table_of_dtypes_is_that_of_the_state() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_load_on_a_frame(dtype: str) -> None:
    layout, image = image_of([region(f"x.{at}", dtype, shape, at) for at, shape in enumerate(SHAPES)])
    for number, entry in enumerate(layout.entries):
        archive = bytes(image[entry.frame_start : entry.frame_start + entry.frame_bytes])
        assert is_same(torch.load(io.BytesIO(archive), weights_only=True), view(layout, image, number))
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            assert opened.read("archive/version") == b"3\n" and len(opened.infolist()) == 4


def directory(root: Path, dtypes: list[str]) -> tuple[ImageLayout, bytearray]:
    pieces = [
        region(f"{dtype}.{at}", dtype, shape, number * 10 + at)
        for number, dtype in enumerate(dtypes)
        for at, shape in enumerate(SHAPES)
    ]
    layout, image = image_of(pieces)
    (root / "part-0.safetensors").write_bytes(image)
    (root / ".metadata").write_bytes(dcp_metadata([("part-0.safetensors", layout)]))
    return layout, image


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    layout, image = directory(tmp_path, list(DTYPES))
    with safetensors.safe_open(tmp_path / "part-0.safetensors", "pt") as opened:
        assert opened.metadata()["job"] == "a test"
        for number, entry in enumerate(layout.entries):
            wanted = view(layout, image, number)
            if entry.dtype not in FORMAT_NAMES:
                wanted = wanted.reshape(-1).view(torch.uint8)
            assert is_same(opened.get_tensor(entry.name), wanted), entry.name


def test_dcp_load_and_its_way_to_torch_save(tmp_path: Path) -> None:
    layout, image = directory(tmp_path, list(DTYPES))
    wanted = {entry.name: view(layout, image, number) for number, entry in enumerate(layout.entries)}
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(is_same(found[name], value) for name, value in wanted.items())
    dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    nested = torch.load(tmp_path / "one.pt", weights_only=True)
    assert all(is_same(nested[dtype][at], wanted[f"{dtype}.{at}"]) for dtype in DTYPES for at in map(str, range(4)))


def test_dcp_from_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    layout, image = directory(tmp_path, list(FORMAT_NAMES))
    wanted = {entry.name: view(layout, image, number) for number, entry in enumerate(layout.entries)}
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(is_same(found[name], value) for name, value in wanted.items())


def test_regions_of_several_parts_are_one_tensor(tmp_path: Path) -> None:
    """Rows of two parts; what both have whole; what is another tensor in each; what one has none of."""
    parts = []
    for number in range(2):
        rows = region("model.w", "float32", (3, 2), 0, offsets=(3 * number, 0), full_shape=(6, 2))
        empty = region("model.e", "float32", (2 * (1 - number), 2), 1, offsets=(2 * number, 0), full_shape=(2, 2))
        own = region("rng", "uint8", (number + 4,), 2)
        layout, image = image_of([rows, empty, own, region("step", "float32", (), 3)])
        (tmp_path / f"part-{number}.safetensors").write_bytes(image)
        parts.append((f"part-{number}.safetensors", layout))
    (tmp_path / ".metadata").write_bytes(dcp_metadata(parts))
    sizes = {"model.w": (6, 2), "model.e": (2, 2), "step": ()}
    found = {name: torch.full(size, -1.0) for name, size in sizes.items()}
    numbers = {"rng": torch.zeros(4, dtype=torch.uint8), "rng@1": torch.zeros(5, dtype=torch.uint8)}
    dcp.load({**found, **numbers}, checkpoint_id=tmp_path, no_dist=True)
    half = view(layout, image, 0)
    assert torch.equal(found["model.w"], torch.cat([half, half])) and torch.equal(found["model.e"], half[:2])
    assert torch.equal(found["step"], view(layout, image, 3))
    assert numbers["rng"].tolist() == [0, 1, 2, 3] and numbers["rng@1"].tolist() == [0, 1, 2, 3, 4]
    dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    nested = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(nested["model"]["w"], found["model.w"]) and nested["rng@1"].shape == (5,)


def test_numbers_in_paths_make_lists_only_where_they_are_some(tmp_path: Path) -> None:
    paths: list[tuple[str | int, ...]] = [("a", 0), ("a", 1), ("b", 0), ("b", "x"), ("c", 2**40), ("d", -1)]
    pieces = [region(".".join(map(str, path)), "int8", (2,), at, path=path) for at, path in enumerate(paths)]
    layout, image = image_of(pieces)
    (tmp_path / "p").write_bytes(image)
    (tmp_path / ".metadata").write_bytes(dcp_metadata([("p", layout)]))
    dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    nested = torch.load(tmp_path / "one.pt", weights_only=True)
    assert isinstance(nested["a"], list) and len(nested["a"]) == 2
    assert set(nested["b"]) == {"0", "x"} and set(nested["c"]) == {str(2**40)} and set(nested["d"]) == {"-1"}


@pytest.mark.parametrize("size_bytes", [2**32 - 2, 2**32 - 1, 2**32 + 4096])
def test_a_tensor_of_more_than_four_gigabytes(tmp_path: Path, size_bytes: int) -> None:
    """In a file full of holes: only what is around it is written."""
    layout = plan([region("big", "uint8", (size_bytes,))], 100)
    (entry,) = layout.entries
    path = tmp_path / "big"

    class Sparse:
        """What `frame` writes to."""

        nbytes, itemsize = layout.size_bytes, 1

        def __setitem__(self, where: slice, content: bytes) -> None:
            if (where.start or 0) >= entry.frame_start and where.stop <= entry.frame_start + entry.frame_bytes:
                os.pwrite(file, content, where.start - entry.frame_start)

    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.truncate(file, entry.frame_bytes)
    layout.frame(Sparse())  # type: ignore[arg-type]
    os.pwrite(file, b"\x07", entry.end - 1 - entry.frame_start)
    os.close(file)
    with zipfile.ZipFile(path) as opened:
        assert opened.getinfo("archive/data/0").file_size == size_bytes
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (size_bytes,) and loaded[-1] == 7 and loaded[0] == 0


def test_what_shards_have_in_shares_of_their_own_is_listed_as_the_first_has_it(tmp_path: Path) -> None:
    """Two shards have six rows each; shares are cut after rows 4 and 2. The third row begins two regions."""
    rows = [(0, 4), (0, 2), (4, 6), (2, 6)]  # shard 0 and 1 of share 0, then of share 1
    parts = []
    for number, (start, stop) in enumerate(rows):
        layout, image = image_of([region("w", "float32", (stop - start,), 0, offsets=(start,), full_shape=(6,))])
        (tmp_path / f"part-{number}.safetensors").write_bytes(image)
        parts.append((f"part-{number}.safetensors", layout))
    (tmp_path / ".metadata").write_bytes(dcp_metadata(parts, shards=2))
    listed: Any = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"]
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed.chunks] == [((0,), (4,)), ((4,), (2,))]
