"""What a person sees of a job while this node's agent runs: its start, its progress, its end.

    start       one line, when the first view is known: the job's name, its workers, where their output is
    progress    for scripts with a session, on the node of rank 0. On a terminal in place, twice a second; elsewhere a
                line after ten seconds and then one a minute, so that a log of a week stays readable
    end         one line: how it ended, steps, time, incidents; after Ctrl-C the command that goes on

Incidents, planned changes and findings are lines of the master (core/notices.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.agent.config import AgentConfig
from holdfast.agent.worker_processes import Worker
from holdfast.core.orders import Exit, Order, Serve
from holdfast.core.records import Outcome
from holdfast.core.wording import counted, duration
from holdfast.util.logs import get_logger
from holdfast.util.status_line import STATUS_LINE

DRAW_EVERY_S = 0.5
LINE_FIRST_S = 10.0
"""A run that is over by then needs no line of its progress."""
LINE_EVERY_S = 60.0
RATE_OVER_S = 30.0
"""Steps per second are measured over this time: long enough to be steady, short enough to show a change."""
CAUSE_CHARS_MAX = 100

log = get_logger(__name__)


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far training is."""

    done: int
    """Steps that are committed."""
    total: int
    """0: not known."""
    per_s: float
    """0: not known yet."""
    loss: float | None
    incidents: int
    last_incident: str
    since_incident_s: float


def progress_line(progress: JobProgress) -> str:
    """Return progress as text, what is not known left out."""
    of = f" of {progress.total:,}" if progress.total else ""
    parts = [f"step {progress.done:,}{of}"]
    if progress.per_s >= 1:
        parts.append(f"{progress.per_s:.1f} steps/s")
    elif progress.per_s > 0:
        parts.append(f"{1 / progress.per_s:.1f} s a step")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.total > progress.done and progress.per_s > 0:
        parts.append(f"{duration((progress.total - progress.done) / progress.per_s)} left")
    if progress.incidents:
        last = progress.last_incident[:CAUSE_CHARS_MAX]
        before = f"{duration(progress.since_incident_s)} ago: {last}"
        parts.append(
            f"1 incident, {before}" if progress.incidents == 1 else f"{progress.incidents} incidents, last {before}"
        )
    return " | ".join(parts)


class JobConsole:
    """The console of one agent. `ranked` returns its workers with a rank, `steps_made` how far those came that
    ended."""

    def __init__(
        self, config: AgentConfig, ranked: Callable[[], Sequence[Worker]], steps_made: Callable[[], int]
    ) -> None:
        self._config, self._ranked, self._steps_made = config, ranked, steps_made
        self._began_at = time.monotonic()
        self._job_id = ""
        self._order: Serve | None = None
        self._incident_at = 0.0
        self._done = 0
        self._samples: deque[tuple[float, int]] = deque()
        """Moments and steps, of the last `RATE_OVER_S` seconds of this view."""
        self._line_at: float | None = None
        """When the next line of progress is due, where there is no terminal."""

    # --- the start

    def obey(self, order: Order) -> None:
        """Show the start of the job at the first order to run workers, and remember what orders say of incidents."""
        if not isinstance(order, Serve):
            return
        if self._order is None:
            self._job_id = order.job_id
            log.notice("job-started", started_line(self._config, order))
        if self._order is None or order.incidents > self._order.incidents:
            self._incident_at = time.monotonic()
        if self._order is None or order.view != self._order.view:
            self._samples.clear()
        self._order = order

    # --- progress

    async def run(self) -> None:
        """Show progress until cancelled. The workers' pages are shared memory: there is no event to wait for."""
        try:
            while True:
                await asyncio.sleep(DRAW_EVERY_S)
                self._show()
        finally:
            STATUS_LINE.clear()

    def _show(self) -> None:
        progress = self._read()
        if progress is None:
            return
        now = time.monotonic()
        text = progress_line(progress)
        if STATUS_LINE.is_enabled and self._config.logs.has_files():
            STATUS_LINE.draw(f"holdfast: {text}")
            return
        self._line_at = now + LINE_FIRST_S if self._line_at is None else self._line_at
        if now >= self._line_at:
            self._line_at = now + LINE_EVERY_S
            log.notice("job-progress", text)

    def _read(self) -> JobProgress | None:
        """Return how far training is, read from the page of the worker of rank 0; None if there is none here, or its
        script has no session that is at its first step."""
        first = next((w for w in self._ranked() if w.assignment and w.assignment.rank == 0 and not w.ended), None)
        if first is None or self._order is None or not first.joined:
            return None
        page, now = first.page, time.monotonic()
        done = max(page.get("applied_step") + 1, page.get("step"), 0)
        self._done = max(self._done, done)
        self._samples.append((now, done))
        while self._samples[0][0] < now - RATE_OVER_S:
            self._samples.popleft()
        began_at, began = self._samples[0]
        return JobProgress(
            done=done,
            total=page.get("total"),
            per_s=(done - began) / (now - began_at) if done > began else 0.0,
            loss=page.loss(),
            incidents=self._order.incidents,
            last_incident=self._order.last_incident,
            since_incident_s=now - self._incident_at,
        )

    # --- the end

    def ended_line(self, outcome: Outcome | None, why: str, incidents: int) -> str:
        """Return the end of the job in one line; for a node that had no part in it, that too."""
        steps = max(self._done, self._steps_made())
        took = duration(time.monotonic() - self._began_at)
        facts = [counted(steps, "step")] if steps else []
        facts += [took, counted(incidents, "incident") if incidents else "no incidents"]
        name = f"job {self._job_id}" if self._job_id else "the job"
        if self._order is None and outcome is None:
            return f"the job did not start on this node ({took}): {why}"
        if self._order is None and outcome is Outcome.SUCCEEDED:
            return f"the job succeeded elsewhere: this node stood by for {took} and ran no workers"
        how = outcome.value if outcome else "failed"
        if outcome is Outcome.SUCCEEDED:
            return f"{name} succeeded: {', '.join(facts)}"
        return f"{name} {how} ({', '.join(facts)}): {why}"

    def incidents(self, order: Order | None) -> int:
        """Return how many incidents the job had, by the newest order."""
        known = [one.incidents for one in (order, self._order) if isinstance(one, Serve | Exit)]
        return max(known, default=0)

    @property
    def job_id(self) -> str:
        """The job's name; empty before its first view."""
        return self._job_id


def started_line(config: AgentConfig, order: Serve) -> str:
    """Return the start of the job in one line."""
    size = f"{counted(order.world_size, 'worker')} on {counted(order.group_world_size, 'node')}"
    if order.group_world_size > 1:
        last = order.first_rank + order.workers - 1
        ours = f"ranks {order.first_rank} to {last}" if order.workers > 1 else f"rank {last}"
        size += f", {ours} on this one ({config.node_id})"
    output = f"; output in {config.logs.run_dir}" if config.logs.has_files() else ""
    return f"job {order.job_id}: {size}{output}; `{status_command(config)}` shows more"


def status_command(config: AgentConfig) -> str:
    """Return the command that shows the job's status, as it works on this node."""
    words = "holdfast status"
    if config.master is None:
        return f"{words} --endpoint {config.master_host}:{config.master_port}"
    default = os.environ.get("HOLDFAST_STATE_DIR") or str(Path.home() / ".holdfast")
    return words if Path(config.state_dir) == Path(default) else f"{words} --state-dir {config.state_dir}"


def signal_words(received: signal.Signals) -> str:
    """Return a signal for people: Ctrl-C for SIGINT."""
    return "Ctrl-C" if received is signal.SIGINT else received.name
