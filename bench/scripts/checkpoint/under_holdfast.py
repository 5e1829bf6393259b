"""A session: snapshots when a turn says so, else none. Its agent writes those that are to become checkpoints."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from training import LOOK_S, STORAGE, Clock, Training, serve, stall_turn, timed

import holdfast as hf

NEVER = 10**6
STEPS = 10**9


class Session:
    def __init__(self) -> None:
        self.job = hf.init(seed=0)
        self.training = Training()
        self.job.track(model=self.training.model, optimizer=self.training.optimizer)
        self._steps = iter(self.job.steps(STEPS))
        self.waited, self.first_s = Clock(), 0.0
        self.step()
        self.snapshots: Any = self.job._engine._state._snapshots
        self._watch()

    def step(self) -> None:
        with next(self._steps):
            self.training.step()

    def _watch(self) -> None:
        """Measured where it keeps the training waiting: at the beginning of a step, and before the update."""
        beginning, joining = self.snapshots.begin, self.snapshots.join

        def begin(step: int) -> None:
            is_first = not self.first_s and self.snapshots._is_next
            with self.waited:
                beginning(step)
            if is_first:  # in the open, beside nothing
                with self.waited:
                    joining(None)
                self.first_s = self.waited.wall_s

        def join(optimizer: Any) -> None:
            with self.waited:
                joining(optimizer)

        self.snapshots.begin, self.snapshots.join = begin, join

    def _set(self, every: int) -> None:
        """A job has one cadence; here it is another in every turn."""
        self.snapshots._settings = msgspec.structs.replace(self.snapshots._settings, every=every)

    def answer(self, what: str, question: dict[str, Any]) -> dict[str, Any]:
        self._set(NEVER)
        match what:
            case "first":
                return self._first()
            case "memcpy":
                self.training.memcpy_s(1)
                return {"memcpy_s": self.training.memcpy_s(1)}
            case "cadence":
                return self._cadence(question["steps"])
            case "durable":
                memcpy_s = self.training.memcpy_s(1)
                durable_s = timed(self._take)
                self.step()  # the next turn's checkpoint is of another step
                return {"memcpy_s": memcpy_s, "durable_s": durable_s}
        is_wanted = question["saver"] == "session-checkpoint"

        def save() -> None:
            """Alone in the world, a rank agrees with itself."""
            self.snapshots._is_next, self.snapshots._is_wanted_next = True, is_wanted

        wait = self._wait if is_wanted else lambda: None
        return stall_turn(self.training, self.step, save, wait, self.waited, question["steps"])

    def _first(self) -> dict[str, Any]:
        """Into slots that have never been written to, once the agent has made them."""
        began_at = time.perf_counter()
        while not self.first_s:
            self.waited.wall_s = 0.0
            self.step()
        room_bytes = 2 * self.snapshots._buffers.page.capacity_bytes()
        return {
            "first_s": self.first_s,
            "until_s": time.perf_counter() - began_at,
            "room": room_bytes / self.training.size_bytes,
        }

    def _take(self) -> None:
        self.snapshots.take(self.job._engine.next_step)
        self.snapshots.join(None)
        self._wait()

    def _wait(self) -> None:
        folder = STORAGE / "session" / f"step-{self.snapshots._last}"
        while not folder.exists():
            time.sleep(LOOK_S)

    def _cadence(self, steps: int) -> dict[str, Any]:
        """Steps without copies, and as many at the interval that is advised."""
        found: dict[str, Any] = {}
        for name, every in (("plain_s", NEVER), ("advised_s", 0)):
            self._set(every)
            self.step()
            found[name] = timed(lambda: [self.step() for _ in range(steps)]) / steps
        found["every"] = self.snapshots._interval()
        return found | {"stall_s": self.snapshots._stall_s, "step_s": self.snapshots._step_s}


if __name__ == "__main__":
    serve("session", Session().answer)
