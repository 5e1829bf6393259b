"""Records out of real files, from any record on."""

import bz2
import gzip
import importlib.util
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast.data import formats
from holdfast.data.formats import Shard, format_of, opener, shards_of
from holdfast.errors import UsageError


def whole(path: Path) -> Shard:
    size = path.stat().st_size
    return Shard(str(path), 0, size, size)


def write_tar(path: Path, members: dict[str, bytes], mode: Literal["w", "w:gz"] = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_lines_are_records_from_any_one_on(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("eins\n\nzwölf\r\nlast without end".encode())
    lines = ["eins", "", "zwölf", "last without end"]
    for first in range(6):
        assert list(opener("text")(whole(path), first)) == lines[first:]


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_packed_lines_are_unpacked(tmp_path: Path, ending: str, pack: Any) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(b'{"a": 1}\n[2]\n'))
    assert format_of(str(path)) == "jsonl"
    assert list(opener("jsonl")(whole(path), 0)) == [{"a": 1}, [2]]
    assert list(opener("jsonl")(whole(path), 1)) == [[2]]
    assert len(shards_of(str(path), "jsonl", split_bytes=1)) == 1


@pytest.mark.parametrize("split_bytes", [1, 7, 50, 10_000])
@pytest.mark.parametrize("end", ["\n", ""])
def test_ranges_side_by_side_have_each_line_once(tmp_path: Path, split_bytes: int, end: str) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"n": n, "text": "x" * (n * 7 % 23)} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, records)) + end)
    shards = shards_of(str(path), "jsonl", split_bytes)
    assert [record for shard in shards for record in opener("jsonl")(shard, 0)] == records
    assert len({shard.name for shard in shards}) == len(shards)
    assert (len(shards) > 1) == (split_bytes < 10_000)


def test_members_of_a_tar_with_one_stem_are_one_record(tmp_path: Path) -> None:
    members = {f"d.0/{n:03}.{kind}": f"{n} {kind}".encode() for n in range(5) for kind in ("jpg", "seg.png")}
    for path in (write_tar(tmp_path / "a.tar", members), write_tar(tmp_path / "a.tgz", members, "w:gz")):
        records = list(opener(format_of(str(path)))(whole(path), 0))
        assert [record["__key__"] for record in records] == [f"d.0/{n:03}" for n in range(5)]
        assert records[3] == {"__key__": "d.0/003", "jpg": b"3 jpg", "seg.png": b"3 seg.png"}
        assert list(opener("tar")(whole(path), 3)) == records[3:]
        assert list(opener("tar")(whole(path), 5)) == []


def test_a_tar_that_ends_in_the_middle_fails_at_its_record(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{n}.bin": bytes(2_000) for n in range(4)})
    path.write_bytes(path.read_bytes()[:6_000])
    found: list[Any] = []
    with pytest.raises((tarfile.ReadError, ValueError)):
        found.extend(record["__key__"] for record in opener("tar")(whole(path), 0))
    assert found in ([], ["0"], ["0", "1"])


def test_a_size_that_a_tar_claims_is_not_believed(tmp_path: Path) -> None:
    """Two kilobytes that would ask for 64 GiB."""
    info = tarfile.TarInfo("0.bin")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**36)}
    holes = b"1\n68719476736\n0\n".ljust(512, b"\0")
    info.size = len(holes)
    with tarfile.open(tmp_path / "holes.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(holes))
    with pytest.raises(ValueError, match="holes"):
        list(opener("tar")(whole(tmp_path / "holes.tar"), 0))
    for name, pack in (("large.tar", bytes), ("large.tgz", gzip.compress)):
        info = tarfile.TarInfo("0.bin")
        info.size = 2**36
        (tmp_path / name).write_bytes(pack(info.tobuf() + bytes(2_048)))
        with pytest.raises((ValueError, tarfile.ReadError), match=r"claims 68,719,476,736 bytes|unexpected end"):
            list(opener("tar")(whole(tmp_path / name), 0))


def test_many_members_of_one_record_are_bounded_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is small enough, but packed zeros are nothing."""
    monkeypatch.setattr(formats, "MEMBER_BYTES_MAX", 1_000)
    path = write_tar(tmp_path / "a.tgz", {f"{n // 2}.{n}": bytes(500) for n in range(4)}, "w:gz")
    assert len(list(opener("tar")(whole(path), 0))) == 2
    path = write_tar(tmp_path / "b.tgz", {f"0.{n}": bytes(500) for n in range(3)}, "w:gz")
    with pytest.raises(ValueError, match=r"record 0 has 1,500 bytes with 0\.2; 1,000 are allowed"):
        list(opener("tar")(whole(path), 0))


def test_a_range_inside_a_line_without_end_reads_no_more_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "LINE_BYTES_MAX", 2**16)
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(2**24) + b"\nlast\n")
    size = path.stat().st_size
    tracemalloc.start()
    try:
        assert list(opener("text")(Shard(str(path), 10, 100, size), 0)) == []
        assert list(opener("text")(Shard(str(path), 10, size, size), 0)) == ["last"]
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_size_that_a_tars_header_claims_is_not_believed(tmp_path: Path, kind: bytes) -> None:
    """A long name, or what extends a header, is read into memory at once: here two kilobytes, or packed zeros."""
    info = tarfile.TarInfo("0.bin")
    info.type, info.size = kind, 2**36
    header = info.tobuf(tarfile.GNU_FORMAT)
    for name, content in (
        ("a.tar", header + bytes(2_048)),
        ("a.tgz", gzip.compress(header + bytes(2**24))),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"a header claims 68,719,476,736 bytes"):
            list(opener("tar")(whole(tmp_path / name), 0))


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    shard = whole(path)
    path.write_text("one\ntwo\nthree\n")
    with pytest.raises(ValueError, match="14 bytes now, and had 8"):
        list(opener("text")(shard, 0))


def test_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"n": list(range(25))}), path, row_group_size=10)
    for first in (0, 9, 10, 24, 25):
        assert list(opener("parquet")(whole(path), first)) == [{"n": n} for n in range(first, 25)]


def test_mistakes_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"a\.csv: the name does not say"):
        format_of("a.csv")
    with pytest.raises(UsageError, match="no format 'xml'"):
        opener("xml")
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="pip install pyarrow"):
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        opener("parquet")
    with pytest.raises(UsageError, match="cannot be used: No such file"):
        shards_of(str(tmp_path / "none.txt"), "text", None)
