"""A worker that speaks to its agent and does nothing else: no torch, no step, whatever it is told it writes down.

Its directory is $FAKE_DIR. What it hears goes to <pid>.heard, one JSON object a line; what the test wants of it is read
from <pid>.do, one command a line. A file named `slow` there keeps it from joining views by itself, one named `mute`
from enrolling.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from holdfast.core.events import SessionInfo
from holdfast.core.shard_map import ShardMap
from holdfast.wire import worker_messages as said
from holdfast.wire.launch_messages import FrameReader, send, socket_address
from holdfast.wire.progress_page import ProgressPage, WorkerPhase

HERE = Path(os.environ["FAKE_DIR"])
POLL_S = 0.005


class FakeWorker:
    def __init__(self) -> None:
        self._page = ProgressPage.open(Path(os.environ["HOLDFAST_PROGRESS"]))
        self._page.move(pid=os.getpid(), phase=WorkerPhase.STARTING)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(socket_address(os.environ["HOLDFAST_SOCKET"]))
        self._view = 0
        self._done = 0
        self._tell(said.Enrol(os.environ["HOLDFAST_WORKER"], os.getpid()))

    def run(self) -> None:
        reader = FrameReader(msgspec.msgpack.Decoder(said.ToWorker))
        while True:
            if select.select([self._socket], [], [], POLL_S)[0]:
                if not reader.receive(self._socket):
                    return
                for message, _ in reader.frames():
                    self._hear(message)
            self._obey()

    def _tell(self, message: said.FromWorker) -> None:
        send(self._socket, message)

    def _hear(self, message: said.ToWorker) -> None:
        with (HERE / f"{os.getpid()}.heard").open("a") as file:
            file.write(json.dumps(msgspec.to_builtins(message)) + "\n")
        match message:
            case said.Welcome(assignment=said.Assignment() as assignment):
                self._take(assignment, built=True)
            case said.Prepare():
                self._ready()
            case said.Assign(assignment=assignment):
                self._take(assignment, built=False)
            case said.Release(view=view):
                self._tell(said.WorkerReleased(view, 9))
                sys.exit(0)
            case said.ShowStacks(request=request):
                self._tell(said.StacksMessage(request, (HERE / "stack").read_text()))
            case _:
                pass

    def _take(self, assignment: said.Assignment, built: bool) -> None:
        self._view = assignment.view
        if built:
            self._ready()
        if not (HERE / "slow").exists() and not assignment.planned:
            self._join()

    def _ready(self) -> None:
        self._page.move(phase=WorkerPhase.PARKED)
        shards = int(os.environ.get("FAKE_SHARDS", "1"))
        self._tell(said.WorkerReady(SessionInfo(shard_map=ShardMap(shards))))

    def _join(self) -> None:
        self._page.move(view=self._view, phase=WorkerPhase.BETWEEN)
        self._tell(said.ViewJoinedMessage(self._view, 0))

    def _obey(self) -> None:
        try:
            lines = (HERE / f"{os.getpid()}.do").read_text().splitlines()
        except FileNotFoundError:
            return
        for line in lines[self._done :]:
            self._done += 1
            self._do(*line.split())

    def _do(self, command: str, *numbers: str) -> None:
        match command:
            case "join":
                self._join()
            case "own-state":
                self._tell(said.SessionRevisedMessage(SessionInfo(resizable=False, per_rank=True, local_replicas=1)))
            case "commit":
                self._tell(said.StepCommittedMessage(self._view, int(numbers[0])))
            case "step-error":
                self._tell(
                    said.StepInterruptedMessage(
                        view=int(numbers[0]),
                        step=3,
                        at=time.time(),
                        exception="ConnectionError",
                        message="cut\n\nAt:\n  pair.cc(553)",
                        traceback="",
                        collateral=True,
                    )
                )
            case "set":
                pairs = [word.split("=") for word in numbers]
                self._page.move(**{name: int(number) for name, number in pairs})
            case "hang-up":
                self._socket.close()
                signal.pause()
            case "vanish":
                os._exit(0)
            case "exit":
                if numbers[0] == "0":
                    self._page.move(phase=WorkerPhase.ENDED)  # as a session does when its loop is left
                sys.exit(int(numbers[0]))


if __name__ == "__main__":
    if (HERE / "mute").exists():
        signal.pause()
    FakeWorker().run()
