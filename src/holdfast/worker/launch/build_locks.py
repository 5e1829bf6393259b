"""The lock files of torch's C++ extension builds, made so that a build that was killed does not stop every later start.

`torch.utils.cpp_extension.load` builds under a file named `lock` in the build directory. The process that creates it
builds, all others wait until it is gone, without a limit and without a word. The file does not say whose it is: one
whose process was killed keeps every later start waiting forever (torch.utils.file_baton.FileBaton).

In Holdfast's workers the file is also held by the kernel (flock), which lets go when the process ends, and it says who
made it. So a lock file that exists and is not held is one whose owner is dead, if it was made by such a worker:

    made by        held (flock)    in use as far as can be seen               what is done
    a worker       yes                                                        wait; after 10 s say for whom
    a worker       no              it was on this machine, in this boot       take it over, and build
    a worker       no              another machine, or a file system          wait, and say what to do
                                   without locks
    others         no              a process here has it open                 wait
    others         no              no process here has it open, and no        take it over, and build
                                   process elsewhere can have it
    others         no              other machines or containers may           wait, and say what to do

A lock is taken over by holding it (flock), never by removing it and creating another: of several that find it at once
one gets it. A process that waits for a build cannot build itself (torch takes it for done when `wait` returns), so if
the builder dies meanwhile it raises; the process that replaces it builds.
"""

from __future__ import annotations

import fcntl
import importlib.abc
import importlib.machinery
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from holdfast.errors import BuildLockError

MODULE = "torch.utils.file_baton"
MARK = "holdfast"
SAY_AFTER_S = 10.0
"""Most builds take longer, but one line is not much."""
LOOK_EVERY_S = 1.0
YOUNG_S = 2.0
"""A lock of others is left alone for so long: between its creation and its being used nothing can be told."""
LOOK_PATIENCE_S = 0.2
OWNER_BYTES_MAX = 500
PRIVATE_FILE_SYSTEMS = frozenset({"overlay", "tmpfs", "ramfs"})
"""Those that a container has for itself."""
LOCAL_FILE_SYSTEMS = PRIVATE_FILE_SYSTEMS | {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"}
"""Those that no other machine has mounted."""
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own: a process in it sees all others of the machine. Fixed in its sources (PROC_PID_INIT_INO)."""

State = Literal["gone", "dead", "held", "unknown"]


class LockOwner(NamedTuple):
    """Who made a lock file."""

    host: str
    boot_id: str
    pid: str

    @classmethod
    def of_this_process(cls) -> LockOwner:
        return cls(socket.gethostname(), _boot_id(), str(os.getpid()))

    @classmethod
    def read(cls, descriptor: int) -> LockOwner | None:
        """Return the owner that the file names. None if the file was not made by a worker of Holdfast, or is not
        written yet."""
        words = os.pread(descriptor, OWNER_BYTES_MAX, 0).decode(errors="replace").split()
        return cls(*words[1:]) if len(words) == 4 and words[0] == MARK else None

    def write(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{MARK} {self.host} {self.boot_id} {self.pid}\n".encode(), 0)


class LockState(NamedTuple):
    """What is known of a lock file."""

    state: State
    owner: LockOwner | None = None
    why: str = ""
    """Why nothing more can be known."""


# --- in the place of FileBaton's methods; `baton` is a FileBaton


def try_acquire(baton: Any) -> bool:
    """Create the lock file and hold it, or take over one whose owner is dead."""
    while True:
        try:
            descriptor = os.open(baton.lock_file_path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except FileExistsError:
            taken = _take_over(baton.lock_file_path)
            if taken is None:
                return False
            if taken < 0:
                continue  # it has gone meanwhile
            _say(f"{baton.lock_file_path} was left by a build whose process is dead: it is taken over, and built again")
            baton.fd = taken
            return True
        if _hold(descriptor) is False:
            os.close(descriptor)  # another process has it: it waits, as if it had come second
            return False
        with suppress(OSError):  # a full disk: then it is a lock as without Holdfast
            LockOwner.of_this_process().write(descriptor)
        baton.fd = descriptor
        return True


def wait(baton: Any) -> None:
    """Wait until the build is over; raise if its process has died."""
    started, looked, is_said = time.monotonic(), 0.0, False
    while Path(baton.lock_file_path).exists():
        time.sleep(baton.wait_seconds)
        now = time.monotonic()
        if now - looked < LOOK_EVERY_S:
            continue
        looked = now
        found = examine(baton.lock_file_path)
        if found.state == "dead":
            raise BuildLockError(
                f"the process that built a C++ extension under {baton.lock_file_path} has died: start this worker"
                " again, it will then build it itself"
            )
        if not is_said and now - started > SAY_AFTER_S:
            _say(_explain(baton.lock_file_path, found, now - started))
            is_said = True


def release(baton: Any) -> None:
    """Remove the lock file, then let go of it: in the other order another process could take it over in between."""
    os.remove(baton.lock_file_path)  # noqa: PTH107  # as torch does: the path may be anything that os takes
    if baton.fd is not None:
        os.close(baton.fd)


# --- what is known of a lock


def examine(path: str) -> LockState:
    """Find out whether the owner of a lock file lives. It is not changed, nor held for longer than the look."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return LockState("gone")
    except OSError as error:
        return LockState("unknown", why=f"it cannot be opened ({error.strerror})")
    try:
        is_held = _hold(descriptor, patience_s=0.0)
        if is_held is None:
            return LockState("unknown", LockOwner.read(descriptor), "its file system has no locks")
        return _judge(path, descriptor) if is_held else LockState("held", LockOwner.read(descriptor))
    finally:
        os.close(descriptor)


def _take_over(path: str) -> int | None:
    """Hold a lock whose owner is dead, and return its descriptor; None if it lives or that is not known; -1 if the lock
    has gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return -1
    except OSError:
        return None
    if _hold(descriptor):
        state = _judge(path, descriptor).state
        if state == "dead":
            LockOwner.of_this_process().write(descriptor)
            return descriptor
        os.close(descriptor)
        return -1 if state == "gone" else None
    os.close(descriptor)
    return None


def _judge(path: str, descriptor: int) -> LockState:
    """Return the state of a lock file that is open here, and locked by this process alone."""
    if not _is_same_file(path, descriptor):
        return LockState("gone")
    owner = LockOwner.read(descriptor)
    if owner is not None:
        if owner.boot_id == _boot_id():
            return LockState("dead", owner)
        return LockState("unknown", owner, f"it was made on {owner.host}, whose processes cannot be seen from here")
    status = os.fstat(descriptor)
    if time.time() - status.st_mtime < YOUNG_S or _is_open_elsewhere(status):
        return LockState("held")
    why = _why_unseen(path, status)
    return LockState("unknown", why=why) if why else LockState("dead")


def _why_unseen(path: str, status: os.stat_result) -> str:
    """Why a process may have the file open that cannot be seen from here; empty if none can."""
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    kind = _file_system(path)
    if kind not in LOCAL_FILE_SYSTEMS:
        return f"other machines may use the same file system ({kind or 'of an unknown kind'})"
    is_container = str(Path("/proc/self/ns/pid").readlink()) != FIRST_PID_NAMESPACE
    if is_container and kind not in PRIVATE_FILE_SYSTEMS:
        return "other containers may use the same directory"
    return ""


def _is_open_elsewhere(status: os.stat_result) -> bool:
    """Return whether another process of this user has the file open."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    other = link.stat()
                    if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                        return True
    return False


def _file_system(path: str) -> str:
    """Return the kind of the file system that a path is on."""
    assignment, best, kind = os.path.realpath(path), "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        inside = assignment == mount or assignment.startswith(f"{mount.rstrip('/')}/")
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def _is_same_file(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _hold(descriptor: int, patience_s: float = LOOK_PATIENCE_S) -> bool | None:
    """Hold the file until it is closed; False if another process does, None if its file system has no such thing. It is
    tried for a moment, as a process that examines the file holds it too, for as long as that takes."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_PATIENCE_S / 20)
        except OSError:
            return None
        else:
            return True


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _explain(path: str, found: LockState, waited_s: float) -> str:
    by = f" by process {found.owner.pid} on {found.owner.host}" if found.owner else ""
    text = f"waiting for {waited_s:.0f} s for the build of a C++ extension{by}, which has the lock file {path}"
    if found.state != "unknown":
        return text
    return f"{text}. Whether it lives is not known, as {found.why}: if no build is running, delete that file"


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # a stream that the script has closed
        sys.stderr.write(f"holdfast: {text}\n")
        sys.stderr.flush()


# --- how it gets there


def install() -> None:
    """Put this into torch's class, now if it is imported, else as soon as it is."""
    if (module := sys.modules.get(MODULE)) is not None:
        _patch(module)
    elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())


def _patch(module: ModuleType) -> None:
    baton: Any = getattr(module, "FileBaton", None)
    if baton is not None:
        baton.try_acquire, baton.wait, baton.release = try_acquire, wait, release


class _OnImport(importlib.abc.MetaPathFinder):
    """Finds that one module as Python would have, and patches it once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _PatchingLoader(spec.loader.name, spec.loader.path)
        return spec


class _PatchingLoader(importlib.machinery.SourceFileLoader):
    """Torch's own module, then patched."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _patch(module)
