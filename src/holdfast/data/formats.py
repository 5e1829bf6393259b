"""Records out of shards: text lines, JSON lines, tar archives, Parquet files. From any record on, one after the other.

    text       one line is one record, without its end; `.gz`, `.bz2` and `.xz` are unpacked
    jsonl      the same, each line parsed
    tar        members whose names differ only behind the first dot of the last part are one record, in a dictionary:
               {"__key__": "a/0001", "jpg": b"…", "json": b"…"}; they must follow one another, as webdataset writes them
    parquet    one row is one record, a dictionary; needs pyarrow

A shard of lines that is not packed can be split into ranges of bytes: a range has the lines that begin in it, so that
ranges side by side have each line once. The records before the wanted one are skipped without being parsed:
lines are counted, a tar's contents are not read, and Parquet's row groups are skipped entirely.

A file that ends in the middle, or cannot be parsed, raises: the caller decides what becomes of the shard.
"""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import itertools
import json
import lzma
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Self

from holdfast.errors import UsageError

LINE_BYTES_MAX = 2**28
"""A longer line is no record but another kind of file."""
MEMBER_BYTES_MAX = 2**31
"""A larger member of a tar is no record: its size is believed before its bytes are read. In a packed tar, where a few
bytes unpack to gigabytes, all members of a record together."""
TAR_HEADER_BYTES_MAX = 2**20
"""Of what a tar says of a member before it, its long name for instance: it is read into memory at once."""
TAR_HEADERS = frozenset(
    {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE}
)
ROWS_AT_A_TIME = 1_024
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ENDINGS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".tar": "tar",
    ".tgz": "tar",
    ".parquet": "parquet",
}


class Shard(NamedTuple):
    """A file or a range of its bytes."""

    path: str
    begin: int
    end: int
    size_bytes: int
    """The size of the file, which is part of its identity."""

    @property
    def name(self) -> str:
        """Return the name that people and the journal use for it."""
        is_full_file = self.begin == 0 and self.end == self.size_bytes
        return self.path if is_full_file else f"{self.path}[{self.begin}:{self.end}]"


Opener = Callable[[Shard, int], Iterator[Any]]
"""The records of a shard from this one on."""


def opener(name: str) -> Opener:
    """Return the reader of a format, by its name."""
    if name not in OPENERS:
        raise UsageError(f"there is no format {name!r}; there are {', '.join(OPENERS)}, or give a function")
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError("Parquet files are read with pyarrow, which is not installed: pip install pyarrow")
    return OPENERS[name]


def format_of(path: str) -> str:
    """Return the format that a file's name implies."""
    name = PurePosixPath(path)
    ending = PurePosixPath(name.stem).suffix if name.suffix in PACKED else name.suffix
    if ending not in ENDINGS:
        raise UsageError(f"{path}: the name does not say what it is; give format= one of {', '.join(OPENERS)}")
    return ENDINGS[ending]


def shards_of(path: str, format_name: str, split_bytes: int | None) -> list[Shard]:
    """Return the file as one shard, or as ranges of about `split_bytes`, where that is possible."""
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise UsageError(f"the shard {path} cannot be used: {error.strerror}") from error
    if split_bytes is None or format_name not in ("text", "jsonl") or _unpack(path) is not None:
        return [Shard(path, 0, size, size)]
    count = max(1, round(size / split_bytes))
    bounds = [size * part // count for part in range(count + 1)]
    return [Shard(path, begin, end, size) for begin, end in itertools.pairwise(bounds)]


# --- lines


def read_text(shard: Shard, first: int) -> Iterator[str]:
    """Yield lines as strings."""
    for line in _lines(shard, first):
        yield line.decode()


def read_jsonl(shard: Shard, first: int) -> Iterator[Any]:
    """Yield lines parsed as JSON."""
    for line in _lines(shard, first):
        yield json.loads(line)


def _lines(shard: Shard, first: int) -> Iterator[bytes]:
    """Yield lines. An empty line is a record too, so that counting needs no parsing."""
    unpack = _unpack(shard.path)
    if unpack is not None:
        with unpack(shard.path, "rb") as packed:
            yield from itertools.islice(_each_line(packed, None), first, None)
        return
    with Path(shard.path).open("rb") as file:
        _check_size(file, shard)
        if shard.begin:
            file.seek(shard.begin - 1)
            _skip_line(file, shard.end)  # the one that began before; nothing but its end, if one begins right here
        yield from itertools.islice(_each_line(file, shard.end), first, None)


def _each_line(file: IO[bytes], end: int | None) -> Iterator[bytes]:
    position = file.tell() if end is not None else 0
    while end is None or position < end:
        line = file.readline(LINE_BYTES_MAX)
        if not line:
            return
        if len(line) == LINE_BYTES_MAX:
            raise ValueError(f"a line of more than {LINE_BYTES_MAX:,} bytes")
        position += len(line)
        yield line.rstrip(b"\r\n")


def _skip_line(file: IO[bytes], end: int) -> None:
    """Go behind the end of a line, or behind `end`, where nothing is wanted any more."""
    while file.tell() < end:
        part = file.readline(LINE_BYTES_MAX)
        if not part or part.endswith(b"\n"):
            return


def _unpack(path: str) -> Callable[..., Any] | None:
    return PACKED.get(PurePosixPath(path).suffix)


def _check_size(file: IO[bytes], shard: Shard) -> None:
    size = file.seek(0, 2)
    file.seek(0)
    if size != shard.size_bytes:
        raise ValueError(f"the file has {size:,} bytes now, and had {shard.size_bytes:,} when the stream was made")


# --- tar


def read_tar(shard: Shard, first: int) -> Iterator[dict[str, Any]]:
    """Yield groups of members. The contents of those before `first` are not read."""
    with Path(shard.path).open("rb") as file:
        _check_size(file, shard)
        with tarfile.open(fileobj=file, mode="r:*", tarinfo=_BoundedTarInfo) as archive:
            is_packed = archive.fileobj is not file
            limit = MEMBER_BYTES_MAX if is_packed else min(MEMBER_BYTES_MAX, shard.size_bytes)
            number, key, total = -1, "", 0
            record: dict[str, Any] = {}
            for member in _members(archive):
                found, field = _key_of(member.name)
                if number < 0 or found != key:
                    if number >= first:
                        yield record
                    number, key, record, total = number + 1, found, {"__key__": found}, 0
                if number >= first:
                    total += member.size
                    if is_packed and member.size <= limit < total:
                        text = f"record {key:.200} has {total:,} bytes with {member.name:.200}"
                        raise ValueError(f"{text}; {limit:,} are allowed")
                    record[field] = _content(archive, member, limit)
            if number >= first:
                yield record


class _BoundedTarInfo(tarfile.TarInfo):
    """A member whose own header is small: tarfile believes any size, and reads as much."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in TAR_HEADERS and found.size > TAR_HEADER_BYTES_MAX:
            raise ValueError(f"a header claims {found.size:,} bytes; {TAR_HEADER_BYTES_MAX:,} are allowed")
        return found


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # it remembers every one, which for a large archive is a leak
        if member.isfile():
            yield member


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, limit: int) -> bytes:
    """Return the bytes of a member, of which a header of a few bytes can claim any size."""
    if member.issparse():
        raise ValueError(f"{member.name:.200} is stored with holes: write the archive without --sparse")
    if member.size > limit:
        raise ValueError(f"{member.name:.200} claims {member.size:,} bytes; {limit:,} are allowed")
    file = archive.extractfile(member)
    content = file.read() if file else b""
    if len(content) != member.size:
        raise ValueError(f"{member.name} ends after {len(content):,} of {member.size:,} bytes")
    return content


def _key_of(name: str) -> tuple[str, str]:
    """Return the record and the field of a member: a/b.c.d is field c.d of the record a/b."""
    path = PurePosixPath(name)
    stem, _, field = path.name.partition(".")
    return str(path.parent / stem), field


# --- parquet


def read_parquet(shard: Shard, first: int) -> Iterator[dict[str, Any]]:
    """Yield rows."""
    from pyarrow import parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with Path(shard.path).open("rb") as raw:
        _check_size(raw, shard)
        file = parquet.ParquetFile(raw)
        groups, before = _groups_from(file, first)
        rows = (row for part in file.iter_batches(ROWS_AT_A_TIME, row_groups=groups) for row in part.to_pylist())
        yield from itertools.islice(rows, first - before, None)


def _groups_from(file: Any, first: int) -> tuple[list[int], int]:
    """Return the row groups from the one with this row on, and how many rows come before them."""
    before = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if before + rows > first:
            return list(range(group, file.num_row_groups)), before
        before += rows
    return [], before


OPENERS: dict[str, Opener] = {"text": read_text, "jsonl": read_jsonl, "tar": read_tar, "parquet": read_parquet}
