"""What every store promises, on a directory and on fsspec; test_s3.py holds a real S3 server to the same."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import MissingError, UsageError
from holdfast.storage.directory import DirectoryStore
from holdfast.storage.object_store import ObjectStore, chunk_bytes
from holdfast.storage.stores import is_remote, open_store
from holdfast.util.blocks import BLOCK_BYTES
from support.store_contract import check_store


def test_a_directory_keeps_the_promises_of_a_store(tmp_path: Path) -> None:
    check_store(open_store(str(tmp_path / "deep" / "down")))
    assert not [path for path in (tmp_path / "deep" / "down").iterdir() if path.name.startswith(".put-")]


def test_memory_of_fsspec_keeps_the_promises_of_a_store() -> None:
    check_store(open_store(f"memory://{secrets.token_hex(4)}/run"))


def test_a_local_file_system_of_fsspec_keeps_the_promises_of_a_store(tmp_path: Path) -> None:
    check_store(open_store(f"local://{tmp_path}/run"))


def test_memory_that_is_not_aligned_and_sizes_that_are_not_pages_are_written_too(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    content = secrets.token_bytes(BLOCK_BYTES + 4097)
    odd = memoryview(b"x" + content)[1:]  # nowhere near a page
    store.put("a", [odd[:BLOCK_BYTES], odd[BLOCK_BYTES:]], len(content))
    assert (tmp_path / "a").read_bytes() == content


def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []
    real_open = os.open

    def open_without(path: object, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_without)
    content = secrets.token_bytes(100_001)
    open_store(str(tmp_path)).put("a", [memoryview(content)], len(content))
    assert refused
    assert (tmp_path / "a").read_bytes() == content


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("relative", DirectoryStore, str(Path("relative").absolute())),
        ("file:///a/b%20c", DirectoryStore, "/a/b c"),
        ("s3://bucket/run/", ObjectStore, "s3://bucket/run"),
        ("gs://bucket/run", ObjectStore, "gs://bucket/run"),
    ],
)
def test_a_url_means_a_store(url: str, kind: type, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    store = open_store(url)
    assert isinstance(store, kind)
    assert store.url == shown
    assert is_remote(url) == (kind is ObjectStore)


@pytest.mark.parametrize("url", ["", "file://host/path", "nonsense://x", "az://container/x"])
def test_a_url_that_means_none_is_refused_with_a_sentence(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "nothing"))
    assert store.names("") == {}
    assert store.folders() == []
    with pytest.raises(MissingError):
        store.read("step-1/manifest.json")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 80_000 * 2**20, 5 * 2**40])
def test_an_upload_never_has_more_parts_than_s3_allows(size: int) -> None:
    assert chunk_bytes(size) % BLOCK_BYTES == 0
    assert size <= chunk_bytes(size) * 10_000
