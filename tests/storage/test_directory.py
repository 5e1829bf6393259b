"""Storage that refuses: full, too small a limit, no permission, slow. One sentence, the older checkpoint stays, and
nothing half-written is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import CheckpointError, StorageError
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.stores import open_store
from support.processes import environment
from support.saves import about, image, save, saved, visible

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")

SAVE = """
import os, resource, sys, tempfile
from support.saves import save
from holdfast.storage.stores import open_store
from holdfast.errors import StorageError
with tempfile.TemporaryDirectory() as elsewhere:
    save(open_store(elsewhere), 1)  # imports what another user may not
{before}
try:
    save(open_store(sys.argv[1]), 2)
except StorageError as error:
    print(error)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "disk"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", str(root)], check=True)


@needs_root
def test_a_full_disk_is_a_sentence_and_the_older_checkpoint_stays(small_disk: Path) -> None:
    catalogue = saved(small_disk, [1])
    with (
        pytest.raises(StorageError, match=r"No space left on device\. Make room"),
        CheckpointWriter(catalogue.store, about(2, 1), "a") as writing,
    ):
        writing.write_part(0, image(0, 2_000_000))
    assert visible(small_disk) == {"step-1"}
    latest = catalogue.latest(on_damage=pytest.fail)
    assert latest is not None
    assert latest.step == 1
    assert sum(catalogue.store.names("").values()) < 200_000  # what was written of it is gone
    writing.abandon()
    save(catalogue.store, 3)


@needs_root
def test_a_disk_that_is_full_for_the_manifest_publishes_nothing(small_disk: Path) -> None:
    catalogue = saved(small_disk, [1])
    with CheckpointWriter(catalogue.store, about(2, 1), "a") as writing:
        writing.write_part(0, image(0))
        (small_disk / "filler").write_bytes(bytes(_free(small_disk)))
        with pytest.raises(StorageError, match="No space left"):
            writing.publish()
        assert [found.step for found in catalogue.list().found] == [1]
        (small_disk / "filler").unlink()
        assert writing.publish() is not None
    assert [found.step for found in catalogue.list().found] == [2, 1]


def _free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_bsize


def _told(root: Path, before: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SAVE.format(before=before), str(root)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_a_file_size_limit_is_a_sentence(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    told = _told(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))")
    assert "part-0.safetensors cannot be written: File too large" in told
    assert "ulimit" in told
    assert [found.step for found in catalogue.list().found] == [1]
    assert not list(tmp_path.rglob(".put-*"))


@needs_root
def test_a_directory_that_may_no_longer_be_written_is_a_sentence() -> None:
    with tempfile.TemporaryDirectory() as name:  # not pytest's: what is above it is its owner's alone
        Path(name).chmod(0o755)
        root = Path(name) / "run"
        catalogue = saved(root, [1])
        told = _told(root, "os.setgid(65534); os.setuid(65534)")
        assert "Permission denied" in told
        assert str(root) in told
        assert [found.step for found in catalogue.list().found] == [1]


@needs_root
def test_a_directory_that_was_made_read_only_can_still_be_read(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    subprocess.run(["mount", "--bind", "-o", "ro", str(tmp_path), str(tmp_path)], check=True)
    try:
        found = catalogue.latest(on_damage=pytest.fail)
        assert found is not None
        with pytest.raises(StorageError, match="Read-only file system"):
            save(catalogue.store, 2)
        with pytest.raises(StorageError, match="Read-only file system"):
            catalogue.remove(1, is_forced=True)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    catalogue.verify(found)


def test_a_file_where_the_directory_should_be_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match="run"):
        save(open_store(str(tmp_path / "run")), 1)
    with pytest.raises(CheckpointError, match="run"):
        saved(tmp_path / "run", []).latest()
