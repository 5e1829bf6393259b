"""What surrounds a tensor's bytes in an image, so that stock torch takes them for a torch.save archive.

Such an archive is a zip file, stored without compression: three small files first, then the tensor's bytes, then the
directory. All but the tensor follows from its dtype and shape, so it is written once, before there are values. For the
same reason the zip's own checksum of the values is zero, which torch does not look at; ours are stored elsewhere.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from holdfast.storage.pickles import tensor_pickle

ALIGNMENT_BYTES = 64
"""The alignment of a tensor's first byte: a cache line, which suits the widest vector instructions."""
BIG = 0xFFFFFFFF
"""Sizes and offsets from here on go into zip's 64-bit fields."""
UTF8 = 0x0800
SMALL = (("archive/version", b"3\n"), ("archive/byteorder", b"little"))
"""The files that every archive has beside its pickle."""


class Frame(NamedTuple):
    before: bytes
    after: bytes


def frame(start: int, dtype: str, shape: tuple[int, ...], size_bytes: int) -> Frame:
    """Return what to write at `start`, and what to write behind the tensor's bytes that follow it."""
    before, directory = _small(tensor_pickle(dtype, shape, size_bytes))
    directory += _listed("archive/data/0", size_bytes, 0, len(before))
    before += _aligned("archive/data/0", size_bytes, start + len(before))
    return Frame(before, directory + _end(len(SMALL) + 2, len(directory), len(before) + size_bytes))


def archive(content: bytes) -> bytes:
    """Return a torch.save archive of a pickle alone, without tensors."""
    files, directory = _small(content)
    return files + directory + _end(len(SMALL) + 1, len(directory), len(files))


def _small(content: bytes) -> tuple[bytes, bytes]:
    """Return the small files of an archive, and their entries in the zip directory."""
    files, directory = bytearray(), bytearray()
    for name, data in (("archive/data.pkl", content), *SMALL):
        checksum = zlib.crc32(data)
        directory += _listed(name, len(data), checksum, len(files))
        files += _local(name, len(data), checksum) + data
    return bytes(files), bytes(directory)


def _aligned(name: str, size_bytes: int, start: int) -> bytes:
    """Return a local header padded by an empty extra field, so that the content starts at a multiple of the
    alignment."""
    gap = -(start + len(_local(name, size_bytes, 0))) % ALIGNMENT_BYTES
    if 0 < gap < 4:
        gap += ALIGNMENT_BYTES
    filling = struct.pack("<HH", 0x4650, gap - 4) + bytes(gap - 4) if gap else b""
    return _local(name, size_bytes, 0, filling)


def _local(name: str, size_bytes: int, checksum: int, filling: bytes = b"") -> bytes:
    shown, extra = _sizes(size_bytes)
    title, fields = name.encode(), extra + filling
    version = 45 if extra else 20
    sizes = (checksum, shown, shown, len(title), len(fields))
    return struct.pack("<IHHHHHIIIHH", 0x04034B50, version, UTF8, 0, 0, 0x21, *sizes) + title + fields


def _listed(name: str, size_bytes: int, checksum: int, start: int) -> bytes:
    shown, extra = _sizes(size_bytes)
    title = name.encode()
    version = 45 if extra else 20
    sizes = (checksum, shown, shown, len(title), len(extra), 0, 0, 0, 0, start)
    head = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, UTF8, 0, 0, 0x21, *sizes)
    return head + title + extra


def _sizes(size_bytes: int) -> tuple[int, bytes]:
    if size_bytes < BIG:
        return size_bytes, b""
    return BIG, struct.pack("<HHQQ", 1, 16, size_bytes, size_bytes)


def _end(files: int, directory_bytes: int, directory_start: int) -> bytes:
    wide, shown = b"", directory_start
    if directory_start >= BIG:
        shown, at = BIG, directory_start + directory_bytes
        counts = (files, files, directory_bytes, directory_start)
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, *counts)
        wide += struct.pack("<IIQI", 0x07064B50, 0, at, 1)
    return wide + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, files, files, directory_bytes, shown, 0)
