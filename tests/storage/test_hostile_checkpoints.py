"""Checkpoints that were made to do harm: named, passed over, removable, and read with a bounded amount of memory."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointError, StorageError
from holdfast.storage import header, locks, manifest
from holdfast.storage.image import plan
from holdfast.storage.manifest import Manifest, ManifestNote, decode
from support.processes import environment
from support.saves import saved, visible
from support.small_images import region

HUGE = "9" * 4_000


def _signed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a manifest that lies well: its digest is right, and it is written as ours are."""
    content = json.loads(path.read_text())["content"]
    change(content)
    path.write_text("".join(manifest._document(content)))


def _lie(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: _signed(folder / "manifest.json", change)


def _about(**fields: Any) -> Callable[[Path], object]:
    return _lie(lambda content: content["about"].update(fields))


def _part(**fields: Any) -> Callable[[Path], object]:
    return _lie(lambda content: content["parts"][0].update(fields))


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def _socket(path: Path) -> None:
    """Make what cannot even be opened."""
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.fixture
def deep_root(tmp_path: Path) -> Iterator[Path]:
    """A directory whose depth Python's own removal does not survive."""
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path], check=True)


def _nested(folder: Path, depth: int) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    (folder / "manifest.json").unlink()


HARM: dict[str, Callable[[Path], object]] = {
    "a part of 2^62 bytes": _part(size_bytes=2**62),
    "a part of -1 bytes": _part(size_bytes=-1),
    "a part with a number of 4000 digits": _part(size_bytes=int(HUGE)),
    "a part with a checksum that is none": _part(checksums="x" * 8),
    "half a character in the job's id": _about(job_id="\ud800"),
    "half a character in a note": _about(notes={"position": ["\udfff"]}),
    "a text of a megabyte in the job's id": _about(job_id="a" * 2**20),
    "a time that no clock shows": _about(created_unix_s=1e300),
    "a million million shards": _about(shards=10**6, shares=10**6),
    "no shards": _about(shards=0),
    "a view of 2^80": _about(view=2**80),
    "the manifest is a pipe": _instead("manifest.json", os.mkfifo),
    "the manifest is a socket": _instead("manifest.json", _socket),
    "the manifest is a directory": _instead("manifest.json", Path.mkdir),
    "the manifest is a link to a device": _instead("manifest.json", lambda path: path.symlink_to("/dev/zero")),
    "the manifest is a link to another": _instead(
        "manifest.json", lambda path: path.symlink_to(path.parent.parent / "step-1" / "manifest.json")
    ),
    "the manifest is a link to itself": _instead("manifest.json", lambda path: path.symlink_to("manifest.json")),
    "a part is a pipe": _instead("part-0.safetensors", os.mkfifo),
    "a part is a socket": _instead("part-0.safetensors", _socket),
    "a part is a link": _instead("part-0.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "a manifest of 2^40 bytes": lambda folder: os.truncate(folder / "manifest.json", 2**40),
    "a manifest of 120 MiB": lambda folder: (folder / "manifest.json").write_bytes(b'["' + b"a" * 120 * 2**20 + b'"]'),
    "a million lists": lambda folder: (folder / "manifest.json").write_text("[" + "[]," * 10**6 + "[]]"),
}


@pytest.mark.parametrize("harm", HARM)
def test_harm_is_named_passed_over_and_removed(tmp_path: Path, harm: str) -> None:
    catalogue = saved(tmp_path, [1, 2])
    HARM[harm](tmp_path / "step-2")
    told: list[str] = []
    found = catalogue.latest(on_damage=told.append)
    assert found is not None
    assert found.step == 1
    assert "step-2" in told[0]
    assert len(told[0]) < 1_000
    assert [item.step for item in catalogue.list().damaged] == [2]
    catalogue.remove(2)
    assert visible(tmp_path) == {"step-1"}


def test_thousands_of_nested_folders_are_out_of_the_way_at_least(deep_root: Path) -> None:
    catalogue = saved(deep_root, [1, 2])
    _nested(deep_root / "step-2", 1_200)
    assert [item.step for item in catalogue.list().damaged] == [2]
    with pytest.raises(CheckpointError, match="remove it by hand"):
        catalogue.remove(2)
    assert visible(deep_root) == {"step-1"}


OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a directory": lambda name, elsewhere: name.symlink_to(elsewhere),
    "a link to nothing": lambda name, elsewhere: name.symlink_to(elsewhere / "nothing"),
    "a file": lambda name, elsewhere: name.write_text("step 5"),
    "a pipe": lambda name, elsewhere: os.mkfifo(name),
    "a socket": lambda name, elsewhere: _socket(name),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_named_like_a_checkpoint_and_is_no_directory_is_damaged_and_removed_alone(
    tmp_path: Path, kind: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    saved(elsewhere, [5])
    precious = elsewhere / "step-5"
    root = tmp_path / "root"
    catalogue = saved(root, [1])
    OTHERS[kind](root / "step-5", precious)
    before = sorted(precious.iterdir())
    assert [item.step for item in catalogue.list().damaged] == [5]
    found = catalogue.latest(on_damage=lambda text: None)
    assert found is not None and found.step == 1
    catalogue.remove(5)
    assert visible(root) == {"step-1"}
    assert sorted(precious.iterdir()) == before


def test_a_link_inside_a_checkpoint_is_removed_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("all of it")
    catalogue = saved(tmp_path / "root", [1, 2])
    (tmp_path / "root" / "step-2" / "inner").symlink_to(precious)
    catalogue.remove(2)
    assert (precious / "thesis").read_text() == "all of it"
    assert visible(tmp_path / "root") == {"step-1"}


def test_a_checkpoint_is_published_where_a_link_has_its_name(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / "step-2").symlink_to(elsewhere)
    catalogue = saved(root, [2])
    found = catalogue.latest()
    assert found is not None and found.step == 2
    assert not list(elsewhere.iterdir())


PEAK = """
import re, sys
from pathlib import Path
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store
catalogue = CheckpointCatalogue(open_store(sys.argv[1]))
def peak_kib(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kib()
print(len(catalogue.list().damaged), (peak_kib() - before) // 1024)
"""


@pytest.mark.parametrize(
    "content", [b'["' + b"a" * 120 * 2**20 + b'"]', b"[" + b"[]," * (5 * 2**20) + b"[]]"], ids=["a text", "lists"]
)
def test_a_large_manifest_takes_little_memory(tmp_path: Path, content: bytes) -> None:
    saved(tmp_path, [1])
    (tmp_path / "step-1" / "manifest.json").write_bytes(content)
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, env=environment(), check=True
    )
    damaged, peak_mib = map(int, run.stdout.split())
    assert damaged == 1
    assert peak_mib < 100, "as much as six times what is read at most"


def test_a_manifest_as_large_as_its_files_can_need_is_read(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1], notes={"position": "a" * 2**20})
    assert catalogue.latest(on_damage=pytest.fail) is not None


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="what is to be written is not a manifest"):
        saved(tmp_path, [1], run="\ud800")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["about", "nonce", "parts", "part", "step", "notes"]), inner)
        ),
    )
)
def test_whatever_a_document_says_the_answer_is_a_sentence(content: Any) -> None:
    document = {"holdfast_checkpoint": 2, "digest": "", "content": content}
    raws = [json.dumps(content).encode(), json.dumps(document).encode()]
    try:
        raws.append("".join(manifest._document(content)).encode())
    except CheckpointError:
        pass
    for raw in raws:
        for kind in (Manifest, ManifestNote):
            with pytest.raises(CheckpointError):
                decode(raw, kind, "a manifest")


@given(st.binary(max_size=200))
def test_whatever_the_bytes_are_the_answer_is_a_sentence(raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(raw, Manifest, "a manifest")


HEADS = """
import re, sys
from pathlib import Path
from holdfast.errors import CheckpointError
from holdfast.storage import header
def peak_kib(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
raw = b"{" + b",".join(b'"%d":0' % number for number in range(4_000_000)) + b"}"
Path("/proc/self/clear_refs").write_text("5")
before = peak_kib()
try:
    header.decode(raw, 4096)
except CheckpointError as error:
    print((peak_kib() - before) // 1024, error)
"""


def test_a_header_of_millions_of_names_takes_little_memory() -> None:
    run = subprocess.run([sys.executable, "-c", HEADS], capture_output=True, text=True, env=environment(), check=True)
    grown_mib, _, why = run.stdout.partition(" ")
    assert "4000000 keys" in why
    assert int(grown_mib) < 100


def test_a_skeleton_of_gigabytes_is_not_read() -> None:
    layout = plan([region("w", "float32", (4,))], 4096)
    head = header.ImageHead(layout.entries[:0], 0, 2**36, {})
    encoded = header.encode(head, 2**36)
    with pytest.raises(CheckpointError, match="skeleton"):
        header.decode(encoded[8:], 2**36)


LOCKS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda lock, precious: lock.symlink_to(precious),
    "a link to nothing": lambda lock, precious: lock.symlink_to(precious.with_name("new")),
    "a pipe": lambda lock, precious: os.mkfifo(lock),
    "a socket": lambda lock, precious: _socket(lock),
}


@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_that_leads_elsewhere_is_not_taken(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    root = tmp_path / "root"
    catalogue = saved(root, [1])
    (root / ".lock").unlink(missing_ok=True)
    LOCKS[kind](root / ".lock", precious)
    with pytest.raises(CheckpointError, match="cannot be published"):
        saved(root, [2])
    assert precious.read_text() == "thesis" and not precious.with_name("new").exists()
    assert catalogue.latest() is not None


def test_a_lock_that_another_process_never_gives_back_delays_and_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may open a file may lock it."""
    monkeypatch.setattr(locks, "PATIENCE_S", 0.2)
    catalogue = saved(tmp_path, [1])
    found = catalogue.latest()
    assert found is not None
    with (tmp_path / ".lock").open() as lock, (tmp_path / "step-1" / "manifest.json").open() as held:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process has had it locked"):
            saved(tmp_path, [2])
        with catalogue.reading(found):
            pass
    saved(tmp_path, [3])
