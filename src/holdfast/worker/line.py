"""The line to the agent: a thread that hears of new views while the main thread computes or hangs in a collective.

What the agent says is kept as a wanted state, the newest place counting, and a view that is over is left at once: the
thread revokes the group, so that a collective which waits for a dead rank raises. The main thread asks for what it
needs (`wait_for_place`) and tells what happened (`tell`).

The thread touches no tensor and takes the interpreter's lock for microseconds a message.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from holdfast.errors import LaunchError, WireError
from holdfast.wire.local import FrameReader, send, socket_address
from holdfast.wire.session import (
    AskHeld,
    Assign,
    Enrol,
    FromWorker,
    Held,
    HeldImage,
    Place,
    Prepare,
    Release,
    Revoke,
    Room,
    ShowStacks,
    Stacks,
    ToWorker,
    Welcome,
    Written,
)

SOCKET_VARIABLE = "HOLDFAST_SOCKET"
WORKER_VARIABLE = "HOLDFAST_WORKER"
THREAD_NAME = "holdfast-line"
STACKS_CHARS_MAX = 64_000

Revoker = Callable[[str, int], None]
"""Leave every view up to this number, for this reason."""


class Line:
    """One worker's connection. `revoke` is called from the thread."""

    def __init__(self, path: str, worker: str, revoke: Revoker, repairs: bool = True) -> None:
        self._revoke = revoke
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._place: Place | None = None
        self._prepare: Prepare | None = None
        self._welcome: Welcome | None = None
        self._release = 0
        self._held: dict[int, tuple[HeldImage, ...]] = {}
        self._requests = 0
        self._written: dict[int, str] = {}
        self.room: Room | None = None
        """For the images of this worker's state, the newest that the agent has made; see snapshots.py."""
        self._is_lost = False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(socket_address(path))
        except OSError as error:
            raise LaunchError(f"this worker cannot reach its agent at {path}: {error.strerror}") from error
        os.register_at_fork(after_in_child=self._socket.close)  # a data loader's process must not hold the line
        self.tell(Enrol(worker, os.getpid(), repairs))
        threading.Thread(target=self._listen, name=THREAD_NAME, daemon=True).start()

    # --- what the main thread asks

    def welcome(self) -> Welcome:
        """The agent's answer to our enrolment."""
        with self._changed:
            self._wait(lambda: self._welcome is not None)
            assert self._welcome is not None
            return self._welcome

    def wait_for_preparation(self) -> Prepare | Place:
        """For a spare: what the job's state is like, or already a place."""
        with self._changed:
            self._wait(lambda: self._prepare is not None or self._place is not None)
            found = self._place or self._prepare
            assert found is not None
            return found

    def wait_for_place(self, after_view: int) -> Place | None:
        """The newest place, once it is in a later view than this one; None if a later view has none for us."""
        with self._changed:
            self._wait(lambda: self._newest > after_view)
            if self._place is None or self._release > self._place.view:
                return None
            return self._place

    def held(self) -> tuple[HeldImage, ...]:
        """The images that are in the agent's memory."""
        with self._changed:
            self._requests += 1
            request = self._requests
        self.tell(AskHeld(request))
        with self._changed:
            self._wait(lambda: request in self._held)
            return self._held.pop(request)

    def wait_for_written(self, created_ns: int) -> str:
        """What came of an image that was to become a checkpoint: why it did not, or nothing."""
        with self._changed:
            self._wait(lambda: created_ns in self._written)
            return self._written.pop(created_ns)

    @property
    def told_view(self) -> int:
        """The newest view we have been told of."""
        with self._changed:
            return self._newest

    @property
    def _newest(self) -> int:
        return max(self._place.view if self._place else 0, self._release)

    def tell(self, message: FromWorker) -> None:
        """Say something to the agent. Without an agent there is nobody to tell: this process is about to die too."""
        try:
            with self._sending:
                send(self._socket, message)
        except OSError:
            return

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or self._is_lost)
        if not condition():
            raise LaunchError("the agent of this worker is gone: nobody is left to repair the run")

    # --- the thread

    def _listen(self) -> None:
        reader = FrameReader(msgspec.msgpack.Decoder(ToWorker))
        try:
            while reader.receive(self._socket):
                for message, _ in reader.frames():
                    self._take(message)
        except (OSError, WireError):
            pass  # as good as gone
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()

    def _take(self, message: ToWorker) -> None:
        match message:
            case Welcome(place=place):
                self._keep(welcome=message, place=place)
            case Prepare():
                self._keep(prepare=message)
            case Assign(place=place):
                self._keep(place=place)
                if not place.planned:
                    self._revoke(f"view {place.view} takes its place ({place.strategy})", place.view - 1)
            case Revoke(view=view, why=why):
                self._revoke(why, view)
            case Release(view=view):
                self._keep(release=view)
            case ShowStacks(request=request):
                self.tell(Stacks(request, stacks_of_all_threads()))
            case Room():
                self.room = message
            case Held(request=request, images=images):
                with self._changed:
                    self._held[request] = images
                    self._changed.notify_all()
            case Written(created_ns=created_ns, why=why):
                with self._changed:
                    self._written[created_ns] = why
                    self._changed.notify_all()

    def _keep(
        self,
        welcome: Welcome | None = None,
        prepare: Prepare | None = None,
        place: Place | None = None,
        release: int = 0,
    ) -> None:
        with self._changed:
            self._welcome = welcome or self._welcome
            self._prepare = prepare or self._prepare
            if place is not None and (self._place is None or place.view >= self._place.view):
                self._place = place
            self._release = max(release, self._release)
            self._changed.notify_all()


def stacks_of_all_threads() -> str:
    """The main thread first, this one left out."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    texts = [
        f"thread {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threads
        if thread.ident in frames and thread.name != THREAD_NAME
    ]
    return "\n".join(texts)[:STACKS_CHARS_MAX]
