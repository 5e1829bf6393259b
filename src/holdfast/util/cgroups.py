"""The kernel's memory cgroups: which one a process is in, and what limits there are on the way up.

Nothing here raises: files may be absent, unreadable or of another kernel, and then there is no limit to be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# cgroup v1 writes "no limit" as the largest page-aligned number.
LIMIT_BYTES_MAX = 1 << 60
LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
USAGE_FILES = ("memory.current", "memory.usage_in_bytes")
CACHE_COUNTERS = (("total_inactive_file", "inactive_file"), ("total_active_file", "active_file"))
"""Counters of memory.stat: v1's with all groups below, then v2's, which includes them. The kernel frees the page cache
before it enforces a limit; shared memory is not in these."""


class Mount(NamedTuple):
    """Where a cgroup hierarchy is mounted, and which of its directories is shown there."""

    point: Path
    root: str


Mounts = tuple[Mount | None, Mount | None]  # cgroup v2, and v1's memory controller


class Group(NamedTuple):
    """A memory cgroup: its name as the process sees it, its directory, and the mount above which it ends."""

    name: str
    directory: Path
    mount: Path


def group_of(pid: int | str, proc: Path, mounts: Mounts) -> Group | None:
    """Return the memory cgroup of a process: v1's where memory is a v1 controller (hybrid mounts), else v2's."""
    unified, legacy = mounts
    found: Group | None = None
    for line in read(proc / str(pid) / "cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if legacy and "memory" in controllers.split(","):
            return locate(name, legacy)
        if unified and hierarchy == "0" and not controllers:
            found = locate(name, unified)
    return found


def find_mounts(proc: Path) -> Mounts:
    """Return where cgroup v2 and v1's memory controller are mounted."""
    unified: Mount | None = None
    legacy: Mount | None = None
    for line in read(proc / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mounted, kind = left.split(" "), right.split(" ")
        if len(mounted) < 5 or len(kind) < 3:
            continue
        mount = Mount(Path(unescape(mounted[4])), unescape(mounted[3]))
        if kind[0] == "cgroup2":
            unified = unified or mount
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            legacy = legacy or mount
    return unified, legacy


def unescape(field: str) -> str:
    """Decode a path of mountinfo, where a space is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def locate(name: str, mount: Mount) -> Group:
    """Return the directory of a cgroup. In a container without a cgroup namespace the mount shows only a part of the
    tree."""
    root = mount.root.rstrip("/")
    inside = name[len(root) :] if name == root or name.startswith(root + "/") else name
    return Group(name, mount.point / inside.strip("/"), mount.point)


def counter(text: str, name: str, unit: str = "") -> int | None:
    """Return the number beside a name in a file of `name number` lines."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and (number := value.strip().removesuffix(unit).strip()).isdecimal():
            return int(number)
    return None


def read(path: Path) -> str:
    """Return the text of a small file of the kernel, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def levels(group: Group) -> Iterator[Path]:
    """Return the directories of a cgroup and of those above it, as far as they are visible."""
    for directory in (group.directory, *group.directory.parents):
        if directory.is_relative_to(group.mount):
            yield directory


def limit_bytes(directory: Path) -> int | None:
    """Return the limit of this very level; None: it has none."""
    texts = (read(directory / file).strip() for file in LIMIT_FILES)
    limits = (int(text) for text in texts if text.isdecimal() and int(text) < LIMIT_BYTES_MAX)
    return min(limits, default=None)


class Headroom(NamedTuple):
    """Memory that may still be allocated, and where that limit comes from."""

    free_bytes: int
    where: str
    """"on this machine", or within which limit."""


def memory_headroom(proc: Path = Path("/proc")) -> Headroom:
    """Return the memory that this process can allocate before a process is killed for it: what the machine has, or the
    least that a cgroup of ours has left."""
    available = counter(read(proc / "meminfo").replace(":", ""), "MemAvailable", unit="kB")
    least = Headroom(available * 1024 if available is not None else LIMIT_BYTES_MAX, "on this machine")
    group = group_of("self", proc, find_mounts(proc))
    if group is None:
        return least
    found = (_headroom(directory, group.mount) for directory in levels(group))
    return min((least, *(one for one in found if one is not None)))


def _headroom(directory: Path, mount: Path) -> Headroom | None:
    limit, used = limit_bytes(directory), _used_bytes(directory)
    if limit is None or used is None:
        return None
    name = "/" + str(directory.relative_to(mount)).removeprefix(".")
    return Headroom(max(limit - used, 0), f"within the limit of cgroup {name}, {limit / 2**20:.0f} MiB")


def _used_bytes(directory: Path) -> int | None:
    """Return the memory in use without the page cache, which the kernel frees when memory is short."""
    texts = (read(directory / file).strip() for file in USAGE_FILES)
    used = next((int(text) for text in texts if text.isdecimal()), None)
    if used is None:
        return None
    stat = read(directory / "memory.stat")
    cache = (next((n for name in names if (n := counter(stat, name)) is not None), 0) for names in CACHE_COUNTERS)
    return max(used - sum(cache), 0)
