"""Where a node's images of a job are, and what becomes of them when its agent is killed.

    <root>/<job>/<node>/owner         locked by the agent that owns the directory
                        rank-0/       its own workers' snapshots (snapshot_store.py)
                        replicas/     other nodes' images (replica_store.py)
                        parity/       the parity of its group (parity/parity_store.py)

A directory belongs to the agent that holds the lock on its `owner` file; the kernel releases the lock of an agent that
is killed. The next agent of the same user on the machine keeps or removes what has no owner, by what the file says:

    nothing       the job can be started again by its id, and then finds its images: kept for an hour
    ONCE          the job has an id that its agent made up (`--standalone`), so no later start can ask for it: removed

Nothing is removed that is not a real directory of this user: links are not followed, at no level.

A job's directory is private (util/private_directories.py): what is in it is the whole model, and a file that another
user cuts short would end every process that has mapped it. Where `--snapshot-dir` does not name the root, it is in
/dev/shm, under a random name that is recorded in the state directory: a name that others can guess, they can take.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from holdfast.util.files import create_once, write_atomically
from holdfast.util.logs import get_logger
from holdfast.util.private_directories import check_above, is_private, make_private

NAME_CHARS_MAX = 200
"""File systems allow 255."""
OWNER = "owner"
ONCE = b"once\n"
"""The owner file of a job that no later start can continue."""
ORPHAN_AFTER_S = 3_600.0
TRIES = 10
SHARED_MEMORY = Path("/dev/shm")
ROOT_RECORD = "shared-memory"
"""The file of the state directory with the root's name."""
ROOT_NAME = re.compile(r"holdfast-[0-9a-f]{16}\Z")

log = get_logger(__name__)


def default_root(state_dir: Path, memory: Path = SHARED_MEMORY) -> Path:
    """Return the root that all jobs of a state directory share. A name that another user has taken is replaced. Raise
    OSError if it cannot be recorded."""
    record = state_dir / ROOT_RECORD
    name = create_once(record, _new_root_name().encode()).decode(errors="replace").strip()
    if ROOT_NAME.match(name) and (is_private(memory / name) or not os.path.lexists(memory / name)):
        return memory / name
    log.warning("snapshot-directory-taken", f"{memory / name!s:.200} is not a directory of this user: another is used")
    name = _new_root_name()
    write_atomically(record, name.encode())
    return memory / name


def _new_root_name() -> str:
    return f"holdfast-{secrets.token_hex(8)}"


def make_node_dir(root: Path, job_id: str, node_id: str) -> Path:
    """Create the directory of one node of one job in the job's private one. Raise OSError if that is not possible,
    NotPrivateError if others could get at it."""
    directory = node_dir(root, job_id, node_id)
    for _ in range(TRIES):
        try:
            make_private(directory.parent)
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            continue  # the last agent of another job has just removed what was empty
        return directory
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(directory))


def node_dir(root: Path, job_id: str, node_id: str) -> Path:
    """Return the directory of one node of one job."""
    return root / directory_name(job_id) / directory_name(node_id)


def directory_name(text: str) -> str:
    """Return an id as one name in a file system, since a user may have chosen any text; two ids have two names."""
    name = quote(text, safe="", errors="surrogatepass") or "%"
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > NAME_CHARS_MAX:
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        name = f"{name[: NAME_CHARS_MAX - len(digest) - 1]}%{digest}"
    return name


def lock_owner(path: Path) -> int | None:
    """Return the descriptor that holds the lock of a directory's owner; None if another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_still(path, descriptor):
            os.utime(descriptor)
            return descriptor
        os.close(descriptor)  # removed by a collector between our opening and locking it: what we hold has no name


def write_owner(descriptor: int, *, is_resumable: bool) -> None:
    """Write to a locked owner file whether a later start can continue from these images."""
    os.ftruncate(descriptor, 0)
    if not is_resumable:
        os.pwrite(descriptor, ONCE, 0)


def remove_orphans(root: Path) -> None:
    """Remove what killed agents have left: at once if no start can ask for it, else when it is an hour old."""
    removed = [(directory, size) for directory in _directories(root) if (size := _collect(directory)) is not None]
    for directory, _ in removed:
        remove_empty(directory.parent, root)
    if removed:
        total_mib = sum(size for _, size in removed) / 2**20
        names = ", ".join(str(directory.relative_to(root)) for directory, _ in removed[:5])
        more = f" and {len(removed) - 5} more" if len(removed) > 5 else ""
        log.info(
            "orphaned-snapshots-removed",
            f"removed {total_mib:.0f} MiB of snapshots that killed agents had left in {root}: {names}{more}",
        )


def remove_empty(directory: Path, top: Path) -> None:
    """Remove a directory and those above it, up to and including `top`, as far as they are empty."""
    while directory.is_relative_to(top):
        try:
            directory.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return  # something is in it
        directory = directory.parent


def _collect(directory: Path) -> int | None:
    """Remove the images of one node if no agent owns them; return their bytes, None if they stay."""
    path = directory / OWNER
    try:
        age_s = time.time() - path.lstat().st_mtime  # also the test whether it is there: locking would make it
        owner = lock_owner(path) if _is_ours(path, stat.S_ISREG) and _may_go(path, age_s) else None
    except OSError:
        return None
    if owner is None:
        return None
    try:
        # Tested again under the lock, which changes the time: an agent may have started and ended since.
        if age_s < ORPHAN_AFTER_S and os.pread(owner, len(ONCE) + 1, 0) != ONCE:
            return None
        size_bytes = sum(one.lstat().st_blocks * 512 for one in directory.rglob("*"))
        shutil.rmtree(directory, ignore_errors=True)
        return size_bytes
    except OSError:
        return None
    finally:
        os.close(owner)


def _may_go(path: Path, age_s: float) -> bool:
    return age_s >= ORPHAN_AFTER_S or path.read_bytes()[: len(ONCE) + 1] == ONCE


def _directories(root: Path) -> Iterator[Path]:
    """Yield the directories of all nodes of all jobs of this user."""
    try:
        check_above(root / "job")
        jobs = list(root.iterdir()) if not root.is_symlink() else []
    except OSError:
        return
    for job in jobs:
        try:
            if _is_ours(job, stat.S_ISDIR):
                yield from (node for node in job.iterdir() if _is_ours(node, stat.S_ISDIR))
        except OSError:
            continue


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    found = path.lstat()
    return found.st_uid == os.getuid() and is_kind(found.st_mode)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
