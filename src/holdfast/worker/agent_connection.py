"""The connection to the agent: a thread that receives while the main thread computes or hangs in a collective.

What the agent says is stored as a wanted state, the newest assignment counting, and a view that is over is left at
once: the thread revokes the group, so that a collective which waits for a dead rank raises. The main thread asks for
what it needs (`wait_for_assignment`) and sends what happened (`tell`).

The thread touches no tensor and takes the interpreter's lock for microseconds a message.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.errors import LaunchError
from holdfast.util.logs import get_logger
from holdfast.wire.launch_messages import FrameReader, send, socket_address
from holdfast.wire.progress_page import PROGRESS_VARIABLE, ProgressPage
from holdfast.wire.worker_messages import (
    Assign,
    Assignment,
    BuffersReady,
    CheckpointNotice,
    Enrol,
    FromWorker,
    ImageList,
    ListImages,
    Prepare,
    Release,
    Revoke,
    ShowStacks,
    StacksMessage,
    StoredImage,
    ToWorker,
    Welcome,
)
from holdfast.worker.launch.error_file import SOCKET_VARIABLE, WORKER_VARIABLE

log = get_logger(__name__)

LATE_EXIT_CODE = 1
THREAD_NAME = "holdfast-agent"
STACKS_CHARS_MAX = 64_000

Revoker = Callable[[str, int], None]
"""Leave every view up to this number, for this reason."""


def connect_to_agent() -> AgentConnection:
    """Enrol with the agent that started this worker. Ends the process if the agent has ended, or does not wait for it
    any more."""
    from holdfast.worker.collectives import groups

    path = os.environ[SOCKET_VARIABLE]
    try:
        return AgentConnection(path, os.environ[WORKER_VARIABLE], lambda why, view: groups.revoke(why, view))
    except LaunchError as error:
        end_without_agent(str(error))


def open_progress_page() -> ProgressPage:
    """Map this worker's progress page. Ends the process if the agent has closed it."""
    path = os.environ[PROGRESS_VARIABLE]
    try:
        return ProgressPage.open(Path(path))
    except OSError as error:
        end_without_agent(f"its progress page {path} is closed: {error.strerror}")


def end_without_agent(why: str) -> NoReturn:
    """End a worker that has come too late: the job is over, or goes on without it. No traceback of ours would tell the
    user anything."""
    sys.stderr.write(f"holdfast: this worker ends, as its agent does not wait for it any more ({why})\n")
    raise SystemExit(LATE_EXIT_CODE)


class AgentConnection:
    """One worker's connection. `revoke` is called from the thread."""

    def __init__(self, path: str, worker: str, revoke: Revoker, repairs: bool = True) -> None:
        self._revoke = revoke
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._assignment: Assignment | None = None
        self._prepare: Prepare | None = None
        self._welcome: Welcome | None = None
        self._release = 0
        self._image_lists: dict[int, tuple[StoredImage, ...]] = {}
        self._requests = 0
        self._written: dict[int, str] = {}
        self.buffers_ready: BuffersReady | None = None
        """For the images of this worker's state, the newest that the agent has made; see taker.py."""
        self.answers = b""
        """What the collectives of our rank answered when the job started, if we are to build alone."""
        self._is_lost = False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(socket_address(path))
        except OSError as error:
            raise LaunchError(f"this worker cannot reach its agent at {path}: {error.strerror}") from error
        os.register_at_fork(after_in_child=self._socket.close)  # a data loader's process must not hold the connection
        self.tell(Enrol(worker, os.getpid(), repairs))
        threading.Thread(target=self._listen, name=THREAD_NAME, daemon=True).start()

    # --- what the main thread asks

    def welcome(self) -> Welcome:
        """Wait for the agent's answer to our enrolment and return it."""
        with self._changed:
            self._wait(lambda: self._welcome is not None)
            assert self._welcome is not None
            return self._welcome

    def wait_for_preparation(self) -> Prepare | Assignment:
        """Wait, as a spare, until it is known what the job's state is like, or until there is an assignment already."""
        with self._changed:
            self._wait(lambda: self._prepare is not None or self._assignment is not None)
            found = self._assignment or self._prepare
            assert found is not None
            return found

    def wait_for_assignment(self, after_view: int) -> Assignment | None:
        """Wait for an assignment in a later view than this one and return the newest; None if a later view has none for
        us."""
        with self._changed:
            self._wait(lambda: self._newest > after_view)
            if self._assignment is None or self._release > self._assignment.view:
                return None
            return self._assignment

    def list_images(self) -> tuple[StoredImage, ...]:
        """Return the images that are in the agent's memory."""
        with self._changed:
            self._requests += 1
            request = self._requests
        self.tell(ListImages(request))
        with self._changed:
            self._wait(lambda: request in self._image_lists)
            return self._image_lists.pop(request)

    def wait_for_written(self, created_ns: int) -> str:
        """Wait until an image that was to become a checkpoint is written; return why it could not be, or nothing."""
        with self._changed:
            self._wait(lambda: created_ns in self._written)
            return self._written.pop(created_ns)

    @property
    def newest_view(self) -> int:
        """The newest view we have been told of."""
        with self._changed:
            return self._newest

    @property
    def _newest(self) -> int:
        return max(self._assignment.view if self._assignment else 0, self._release)

    def tell(self, message: FromWorker) -> None:
        """Send a message to the agent. Without an agent nothing is sent: this process is about to die too."""
        try:
            with self._sending:
                send(self._socket, message)
        except OSError:
            return

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or self._is_lost)
        if not condition():
            raise LaunchError("the agent of this worker is gone: the run cannot be repaired")

    # --- the thread

    def _listen(self) -> None:
        reader = FrameReader(msgspec.msgpack.Decoder(ToWorker))
        try:
            while reader.receive(self._socket):
                for message, _ in reader.frames():
                    self._handle(message)
        except OSError:
            pass  # as good as gone
        except Exception as error:
            # The agent lives and does not know that this thread has ended: the end of the connection tells it. A rank
            # that hangs in a collective of this view would never hear that it is over.
            log.error("agent-connection-failed", "this worker does not hear its agent any more", error=error)
            self._close()
            self._leave("this worker does not hear its agent any more", self.newest_view)
        finally:  # whatever ends this thread: the main thread must not wait for a message that is not read
            with self._changed:
                self._is_lost = True
                self._changed.notify_all()

    def _close(self) -> None:
        """Shut the connection, so that the agent sees its end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Welcome(assignment=assignment, answers=answers):
                self._store(welcome=message, assignment=assignment, answers=answers)
            case Prepare():
                self._store(prepare=message)
            case Assign(assignment=assignment, answers=answers):
                self._store(assignment=assignment, answers=answers)
                if not assignment.planned:
                    self._leave(f"view {assignment.view} replaces it ({assignment.strategy})", assignment.view - 1)
            case Revoke(view=view, why=why):
                self._leave(why, view)
            case Release(view=view):
                self._store(release=view)
            case ShowStacks(request=request):
                self.tell(StacksMessage(request, stacks_of_all_threads()))
            case BuffersReady():
                self.buffers_ready = message
            case ImageList(request=request, images=images):
                with self._changed:
                    self._image_lists[request] = images
                    self._changed.notify_all()
            case CheckpointNotice(created_ns=created_ns, why=why):
                with self._changed:
                    self._written[created_ns] = why
                    self._changed.notify_all()

    def _leave(self, why: str, view: int) -> None:
        try:
            self._revoke(why, view)
        except Exception as error:  # the next message may be the one that repairs it
            text = f"leaving view {view} failed; this worker goes on listening to its agent"
            log.error("leave-view-failed", text, error=error)

    def _store(
        self,
        welcome: Welcome | None = None,
        prepare: Prepare | None = None,
        assignment: Assignment | None = None,
        release: int = 0,
        answers: bytes = b"",
    ) -> None:
        with self._changed:
            self.answers = answers or self.answers
            self._welcome = welcome or self._welcome
            self._prepare = prepare or self._prepare
            if assignment is not None and (self._assignment is None or assignment.view >= self._assignment.view):
                self._assignment = assignment
            self._release = max(release, self._release)
            self._changed.notify_all()


def stacks_of_all_threads() -> str:
    """Return the stacks of all threads but this one, the main thread's first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    texts = [
        f"thread {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threads
        if thread.ident in frames and thread.name != THREAD_NAME
    ]
    return "\n".join(texts)[:STACKS_CHARS_MAX]
