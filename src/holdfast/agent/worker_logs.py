"""Workers' output: where it is stored, and what of it the console shows.

Every worker writes straight into files that the agent opened for it:

    <run_dir>/attempt_<view - 1>/<local_rank>/{stdout.log,stderr.log,error.json}

So a worker never waits for the agent, nothing is lost if the agent dies, and `holdfast logs` works afterwards.
Attempts are never deleted. What the console shows follows torchrun, per stream:

    -r (redirects)   the file only
    -t (tee)         the console too, each line with a prefix; tee wins over redirects
    neither          the console too, bytes unchanged

A worker that the console shows alone, on a terminal, writes to a pseudo-terminal instead, which the agent copies into
the file at once (terminals.py).

The console is fed from the files, by one thread for each of stdout and stderr. The files are the queue: a console that
stops reading stops its own thread and nothing else, and memory stays bounded however far it falls behind. The threads
are daemons, because one that is stuck in `write` must not keep the agent from exiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import sys
import threading
import time
from pathlib import Path
from string import Template

import msgspec

from holdfast.agent.console_noise import NoiseFilter
from holdfast.agent.held_traceback import HeldTraceback, ReportAtEnd
from holdfast.agent.terminals import Terminals
from holdfast.core.faults.failures import Failure
from holdfast.errors import LaunchError
from holdfast.util.private_directories import make_closed
from holdfast.util.status_line import STATUS_LINE

POLL_S = 0.05
# Long enough for a line that is written in pieces, short enough for a prompt or a progress bar.
PARTIAL_LINE_WAIT_S = 0.2
READ_BYTES_MAX = 256 * 1024
LINE_BYTES_MAX = 64 * 1024
# Small, so that a slow console is seen to move.
CONSOLE_WRITE_BYTES_MAX = 16 * 1024
# Files of ended attempts that a console which fell behind has yet to show.
FOLLOWED_FILES_MAX = 512
DRAIN_POLL_S = 0.005
# A console that took nothing for so long will not; what it missed is in the files.
DRAIN_STALL_S = 5.0
CLOSE_WAIT_S = 0.5

STDOUT = 1
STDERR = 2
StreamChoice = dict[int, int] | int
"""The choice of -r and -t: the sum of STDOUT and STDERR, for all local ranks or for each one."""

# An \r ends a line too (progress bars). The last alternative is a line whose end has not come yet.
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class LogPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The user's choices about output. `run_dir` /dev/null: no files, workers inherit the console."""

    run_dir: Path
    role: str = "default"
    redirects: StreamChoice = 0
    tee: StreamChoice = 0
    local_ranks_filter: frozenset[int] = frozenset()
    """Only these local ranks appear on the console; empty: all."""
    prefix_template: str = ""
    """The prefix of tee'd lines, with ${role_name}, ${rank}, ${local_rank}; empty: `[${role_name}${local_rank}]:`."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    workers: int = 0
    """How many workers the node has."""
    has_report: bool = False
    """Whether the root cause of a failed job is shown at its end, with the traceback, below the workers' output."""

    def gets_terminal(self, local_rank: int, stream: int) -> bool:
        """Return whether a worker is the only one that the console shows, and its stream is shown unchanged."""
        shown = len(self.local_ranks_filter) or self.workers
        return shown == 1 and self.is_shown(local_rank, stream) and not self.is_teed(local_rank, stream)

    def has_files(self) -> bool:
        """Return whether workers write to files."""
        return self.run_dir != Path(os.devnull)

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """Return whether the console shows a stream of a worker."""
        if self.local_ranks_filter and local_rank not in self.local_ranks_filter:
            return False
        return self.is_teed(local_rank, stream) or not chosen(self.redirects, local_rank) & stream

    def is_teed(self, local_rank: int, stream: int) -> bool:
        return bool(chosen(self.tee, local_rank) & stream)

    def prefix(self, local_rank: int, rank: int) -> bytes:
        template = Template(self.prefix_template or "[${role_name}${local_rank}]:")
        return template.safe_substitute(role_name=self.role, rank=rank, local_rank=local_rank).encode()

    def filters(self, stream: int) -> tuple[bytes, ...]:
        filters = self.duplicate_stdout_filters if stream == STDOUT else self.duplicate_stderr_filters
        return tuple(text.encode() for text in filters)


def chosen(choice: StreamChoice, local_rank: int) -> int:
    """Return the streams that are chosen for one local rank."""
    return choice if isinstance(choice, int) else choice.get(local_rank, 0)


class WorkerLogFiles(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's files. Without files the descriptors are None (inherit) and the paths empty."""

    stdout_fd: int | None = None
    stderr_fd: int | None = None
    error_file: str = ""
    stdout_path: str = ""
    stderr_path: str = ""
    stdout_start_bytes: int = 0
    """Where this worker's own output begins, if the file was there before it."""
    stderr_start_bytes: int = 0

    def close(self) -> None:
        """Close the agent's copies of the descriptors, once, when the worker has its own."""
        for fd in (self.stdout_fd, self.stderr_fd):
            if fd is not None:
                os.close(fd)


class WorkerLogs:
    """The files of a node's workers, and the console that shows them."""

    def __init__(self, plan: LogPlan, *, stdout_fd: int = STDOUT, stderr_fd: int = STDERR) -> None:
        self._plan = plan
        self._feeds = {STDOUT: ConsoleFeed(stdout_fd), STDERR: ConsoleFeed(stderr_fd)}
        self._followed: dict[tuple[int, int], FollowedFile] = {}
        self._is_interrupted = False
        self._terminals = Terminals()
        self._descriptors = {STDOUT: stdout_fd, STDERR: stderr_fd}
        self._report = ReportAtEnd()

    def decide_report(self, cause: Failure | None) -> None:
        """Leave the traceback of this failure, which the report at the end shows, off the console. Tracebacks of other
        workers that were held back are shown."""
        self._report.decide(cause)

    def hide_interrupts(self) -> None:
        """Keep the tracebacks of ranks that are stopped by a signal off the console from now on."""
        self._is_interrupted = True

    def open(self, view: int, local_rank: int, rank: int) -> WorkerLogFiles:
        """Open the files of one worker; its console output is shown from now on. Raises LaunchError."""
        if not self._plan.has_files():
            return WorkerLogFiles()
        try:
            return self._open(view, local_rank, rank)
        except OSError as error:
            raise LaunchError(f"cannot open log files under {self._plan.run_dir}: {error.strerror}") from error

    def _open(self, view: int, local_rank: int, rank: int) -> WorkerLogFiles:
        directory = self._plan.run_dir / f"attempt_{view - 1}" / str(local_rank)
        make_closed(self._plan.run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        error_file = directory / "error.json"
        set_aside(error_file)
        stdout, stderr = directory / "stdout.log", directory / "stderr.log"
        with contextlib.ExitStack() as undo:
            stdout_fd, stderr_fd = open_append(stdout, undo), open_append(stderr, undo)
            for stream, path in ((STDOUT, stdout), (STDERR, stderr)):
                self._follow(stream, path, local_rank, rank)
            undo.pop_all()
        stdout_start_bytes, stderr_start_bytes = (os.fstat(fd).st_size for fd in (stdout_fd, stderr_fd))
        return WorkerLogFiles(
            stdout_fd=self._terminal_or_file(STDOUT, local_rank, stdout_fd),
            stderr_fd=self._terminal_or_file(STDERR, local_rank, stderr_fd),
            error_file=str(error_file),
            stdout_path=str(stdout),
            stderr_path=str(stderr),
            stdout_start_bytes=stdout_start_bytes,
            stderr_start_bytes=stderr_start_bytes,
        )

    def _terminal_or_file(self, stream: int, local_rank: int, log_file: int) -> int:
        """Return what a worker writes a stream to."""
        if not self._plan.gets_terminal(local_rank, stream):
            return log_file
        terminal = self._terminals.open(self._descriptors[stream], log_file, self._feeds[stream].show_now)
        if terminal is None:
            return log_file
        os.close(log_file)
        return terminal.slave

    def copy_terminals(self) -> None:
        """Make sure that all that workers have written so far is in their files."""
        self._terminals.copy()

    def _follow(self, stream: int, path: Path, local_rank: int, rank: int) -> None:
        before = self._followed.get((local_rank, stream))
        if not self._plan.is_shown(local_rank, stream) or (before and before.path == path):
            return
        if before:
            before.finish()  # a local rank has one worker at a time: the one before has written all it ever will
        prefix, line_filter = b"", None
        if self._plan.is_teed(local_rank, stream):
            prefix = self._plan.prefix(local_rank, rank)
            line_filter = self._line_filter(stream, path.parent.parent, prefix)
        noise = NoiseFilter(lambda: self._is_interrupted) if stream == STDERR else None
        held = None
        if stream == STDERR and self._plan.has_report and not prefix:  # who wants prefixes wants every line with one
            held = HeldTraceback(path.with_name("error.json"), self._report)
        followed = FollowedFile(path, prefix, line_filter, noise, held)
        self._followed[local_rank, stream] = followed
        self._feeds[stream].add(followed)

    def _line_filter(self, stream: int, attempt: Path, prefix: bytes) -> LineFilter | None:
        needles = self._plan.filters(stream)
        name = "filtered_stdout.log" if stream == STDOUT else "filtered_stderr.log"
        return LineFilter(attempt / name, needles, prefix) if needles else None

    async def drain(self, stall_s: float = DRAIN_STALL_S) -> bool:
        """Wait until all that was written before is shown. False if the console took nothing for `stall_s`."""
        self.copy_terminals()
        self._report.decide(None)  # where the run has ended without a report
        return all(await asyncio.gather(*(feed.drain(stall_s) for feed in self._feeds.values())))

    def close(self) -> None:
        """Stop feeding the console; `drain` first. The files stay."""
        self._terminals.close()
        for feed in self._feeds.values():
            feed.close()


def open_append(path: Path, undo: contextlib.ExitStack) -> int:
    """Open a worker's stream. O_APPEND: its children and their children write to it too."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    undo.callback(os.close, fd)
    return fd


def set_aside(error_file: Path) -> None:
    """Rename an error file of an earlier worker, so that it is not read as this one's."""
    try:
        error_file.rename(f"{error_file}.{error_file.stat().st_mtime_ns}")
    except FileNotFoundError:
        pass


class LineFilter:
    """Copies the lines that contain any of the needles to a file which all local ranks share."""

    def __init__(self, path: Path, needles: tuple[bytes, ...], prefix: bytes) -> None:
        self._path = path
        self._needles = needles
        self._prefix = prefix
        self._partial = b""
        path.touch()

    def feed(self, data: bytes) -> None:
        lines = LINE.findall(self._partial + data)
        self._partial = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < LINE_BYTES_MAX:
            self._partial = lines.pop()
        self._write([line for line in lines if any(needle in line for needle in self._needles)])

    def finish(self) -> None:
        if self._partial:
            self.feed(b"\n")

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(self._prefix + line.rstrip(b"\r\n") + b"\n" for line in lines))
        except OSError:
            pass  # the lines are in the worker's own file; a full disk must not stop the console


class FollowedFile:
    """One stream of one worker on its way to the console.

    Only the feed's thread calls `step` and `close`, so only it touches the descriptor, and it opens it when its turn
    comes: files that wait behind a blocked console cost none.
    """

    def __init__(
        self,
        path: Path,
        prefix: bytes = b"",
        line_filter: LineFilter | None = None,
        noise: NoiseFilter | None = None,
        held: HeldTraceback | None = None,
    ) -> None:
        self.path = path
        self.shown_bytes = path.stat().st_size
        """How far the console has it; the thread that drains reads it."""
        self._prefix = prefix
        self._line_filter = line_filter
        self._noise, self._held = noise, held
        self._fd: int | None = None
        self._partial = b""
        self._partial_since = 0.0
        self._show_to_bytes = 0
        self._finishing = False
        self._at_line_start = True

    def size_bytes(self) -> int:
        """Return the size of the file now; 0 if it was deleted."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0  # it was deleted: there is nothing to wait for

    def show_to(self, size_bytes: int) -> None:
        """Show partial lines before this point at once."""
        self._show_to_bytes = max(self._show_to_bytes, size_bytes)

    def is_shown_to(self, size_bytes: int) -> bool:
        """Return whether all before this point is on the console, or is not to be."""
        is_holding = (self._noise and self._noise.is_holding) or (self._held and self._held.is_holding)
        return self.shown_bytes >= size_bytes and not is_holding

    def finish(self) -> None:
        self._show_to_bytes = sys.maxsize
        self._finishing = True

    def close(self) -> None:
        if self._line_filter:
            self._line_filter.finish()
        if self._fd is not None:
            os.close(self._fd)

    def step(self, feed: ConsoleFeed, now: float) -> tuple[bool, bool]:
        """Show what is new; return whether more is waiting, and whether this file is finished."""
        finishing = self._finishing  # before the read: what was written before `finish` is then in it
        try:
            chunk = self._read()
        except OSError:
            self.shown_bytes = sys.maxsize  # it cannot be read, so nothing has to wait for it
            return False, True
        has_more = len(chunk) == READ_BYTES_MAX
        data = self._partial + chunk
        show_bytes = self._showable_bytes(data, has_more, now)
        self._show(feed, data[:show_bytes])
        self._partial = data[show_bytes:]
        self.shown_bytes += show_bytes
        if self._noise and self._show_to_bytes and not chunk:  # all that there is; what is held back has no end
            self._write(feed, self._noise.flush())
        if self._held:
            self._write(feed, self._held.due(finishing and not chunk))
        return has_more, finishing and not chunk and not self._partial

    def _read(self) -> bytes:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._fd, READ_BYTES_MAX, self.shown_bytes + len(self._partial))

    def _showable_bytes(self, data: bytes, has_more: bool, now: float) -> int:
        """Return how much may be shown: complete lines; the rest after a while, or when it is too long to wait for."""
        # An \r at the very end may be half of \r\n.
        lines_bytes = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1 if data else 0
        if lines_bytes or not self._partial:
            self._partial_since = now
        is_wanted = not has_more and self.shown_bytes + lines_bytes < self._show_to_bytes
        is_old = now - self._partial_since >= PARTIAL_LINE_WAIT_S
        is_long = len(data) - lines_bytes >= LINE_BYTES_MAX
        return len(data) if is_wanted or is_old or is_long else lines_bytes

    def _show(self, feed: ConsoleFeed, data: bytes) -> None:
        if self._line_filter and data:
            self._line_filter.feed(data)
        if self._noise:
            data = self._noise.feed(data)
        if self._held:
            data = self._held.feed(data)
        self._write(feed, data)

    def _write(self, feed: ConsoleFeed, data: bytes) -> None:
        if not data:
            return
        if self._prefix:
            # The rest of a line that was shown in part needs no prefix, unless another's text has come between.
            in_line = not self._at_line_start and feed.last_shown is self
            self._at_line_start = data.endswith((b"\n", b"\r"))
            data = (b"" if in_line else self._prefix) + self._prefix.join(LINE.findall(data))
        feed.last_shown = self
        feed.write(data)


class ConsoleFeed:
    """Copies followed files to one descriptor of the console, in a thread of its own."""

    def __init__(self, fd: int) -> None:
        self.last_shown: FollowedFile | None = None
        self._fd = fd
        self._files: list[FollowedFile] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lost = False
        self._written_bytes = 0

    def add(self, file: FollowedFile) -> None:
        with self._lock:
            if len(self._files) >= FOLLOWED_FILES_MAX:
                return  # hopelessly behind: the file has it all
            self._files.append(file)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"console-{self._fd}", daemon=True)
            self._thread.start()

    def show_now(self) -> None:
        """Show all that is in the files at once, parts of lines too: a user may be typing."""
        with self._lock:
            files = list(self._files)
        for file in files:
            file.show_to(file.size_bytes())
        self._wake.set()

    async def drain(self, stall_s: float) -> bool:
        with self._lock:
            goals = [(file, file.size_bytes()) for file in self._files]
        for file, size_bytes in goals:
            file.show_to(size_bytes)
        moved_bytes, moved_at = -1, 0.0
        while not all(file.is_shown_to(size_bytes) for file, size_bytes in goals):
            if self._written_bytes != moved_bytes:
                moved_bytes, moved_at = self._written_bytes, time.monotonic()
            if self._closing or time.monotonic() - moved_at > stall_s:
                return False
            self._wake.set()
            await asyncio.sleep(DRAIN_POLL_S)  # the feed is a thread; only the agent's end waits for it, no recovery
        return True

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)

    def write(self, data: bytes) -> None:
        """Write to the console, blocking. Once the console is closed, write nothing more: the files have it all."""
        rest = memoryview(data)
        while rest and not self._lost:
            try:
                with STATUS_LINE.making_way(rest[:CONSOLE_WRITE_BYTES_MAX], self._fd):
                    count_bytes = os.write(self._fd, rest[:CONSOLE_WRITE_BYTES_MAX])
            except BlockingIOError:
                select.select([], [self._fd], [], POLL_S)  # another process made the shared terminal non-blocking
                self._lost = self._closing
            except OSError:
                self._lost = True
            else:
                rest = rest[count_bytes:]
                self._written_bytes += count_bytes

    def _run(self) -> None:
        while not self._closing:
            if not self._turn():
                self._wake.wait(POLL_S)
                self._wake.clear()
        for file in self._files:
            file.close()

    def _turn(self) -> bool:
        """Show what is new in every file; return whether any has more."""
        with self._lock:
            files = list(self._files)
        is_behind = False
        for file in files:
            has_more, is_finished = file.step(self, time.monotonic())
            is_behind = is_behind or has_more
            if is_finished:
                with self._lock:
                    self._files.remove(file)
                file.close()
        return is_behind


def read_tail(path: str, bytes_max: int, start_bytes: int = 0) -> str:
    """Return the end of a file as text, from `start_bytes` on at the earliest; "" if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            from_bytes = max(start_bytes, size_bytes - bytes_max, 0)
            file.seek(from_bytes)
            data = file.read(bytes_max)
    except OSError:
        return ""
    if from_bytes > start_bytes and b"\n" in data[:-1]:
        data = data.partition(b"\n")[2]  # start with a complete line, if there is one
    return TERMINAL_CODES.sub("", data.decode("utf-8", "replace"))


def tail_lines(path: str, lines_max: int, bytes_max: int, start_bytes: int = 0) -> tuple[str, ...]:
    """Return the last lines of a file, of a progress bar its last state."""
    text = read_tail(path, bytes_max, start_bytes).rstrip()
    lines = text.split("\n")[-lines_max:] if text else []
    return tuple(line.rstrip("\r").rpartition("\r")[2] for line in lines)
