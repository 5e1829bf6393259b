"""Where the machines' time went. Every second of every machine is in exactly one account: they add up to the fleet's
time, and what is charged is all of it, spares included.

    training                 work that counts
    redone steps             work of the step that a fault broke off
    since the checkpoint     work that was lost with the state
    checkpoints              machines that wait for a checkpoint to be copied
    stalled: ...             machines with ranks, while training stands still; by the reason
    waiting for machines     machines that are well, while too few are there
    idle                     machines that are well and have no rank: spares, and those that came back too early
    banned                   the same, of those that the job takes as a last resort only
    away                     well, and on their way back into the job
    in repair                lost to anybody
"""

from __future__ import annotations

from collections import defaultdict

TRAINING, REDONE, SINCE_CHECKPOINT, CHECKPOINTS = "training", "redone steps", "since the checkpoint", "checkpoints"
WAITING, IDLE, BANNED, AWAY, IN_REPAIR = "waiting for machines", "idle", "banned", "away", "in repair"
BUCKETS = 240
"""Points of the course that a plot shows."""


class TimeLedger:
    """The accounts, in machine seconds."""

    def __init__(self, nodes: int, span_s: float, checkpoint_every_s: float, checkpoint_stall_s: float) -> None:
        self.nodes, self.span_s = nodes, span_s
        self.accounts: defaultdict[str, float] = defaultdict(float)
        self.training_course = [0.0] * BUCKETS
        self.repair_course = [0.0] * BUCKETS
        """By part of the time: the share of the fleet that trained, and that was in repair."""
        self.now = 0.0
        self.in_repair = self.away = self.banned = 0
        """Machines, at present. Those that are banned are here; the others are not."""
        self.members = 0.0
        """Machines with ranks, in the view in force; fewer may be left."""
        self.why_stalled: str = WAITING
        """Empty: training goes on."""
        self._every_s = checkpoint_every_s
        self._stall_share = min(checkpoint_stall_s / checkpoint_every_s, 1.0) if checkpoint_every_s else 0.0
        self._going_since = 0.0
        self._trained_s = self._unsaved = 0.0
        """Since the last checkpoint: seconds of training, and the work in them."""

    def advance(self, now: float) -> None:
        """Book the time until now, in which nothing changed."""
        seconds = now - self.now
        if seconds <= 0.0:
            return
        here = self.nodes - self.in_repair - self.away
        working = min(self.members, float(here)) if self.why_stalled != WAITING else 0.0
        idle = here - working
        banned = min(float(self.banned), idle)
        accounts = self.accounts
        accounts[IN_REPAIR] += self.in_repair * seconds
        accounts[AWAY] += self.away * seconds
        accounts[BANNED] += banned * seconds
        accounts[WAITING if self.why_stalled == WAITING else IDLE] += (idle - banned) * seconds
        if not self.why_stalled:
            self._train(working, seconds)
        elif working:
            accounts[self.why_stalled] += working * seconds
        trained = working * (1.0 - self._stall_share) if not self.why_stalled else 0.0
        self._draw(self.training_course, trained / self.nodes, now)
        self._draw(self.repair_course, self.in_repair / self.nodes, now)
        self.now = now

    def _train(self, working: float, seconds: float) -> None:
        self.accounts[CHECKPOINTS] += working * seconds * self._stall_share
        self.accounts[TRAINING] += working * seconds * (1.0 - self._stall_share)
        work = working * (1.0 - self._stall_share)
        self._trained_s += seconds
        self._unsaved += work * seconds
        if self._every_s and self._trained_s >= self._every_s:
            self._trained_s %= self._every_s
            self._unsaved = work * self._trained_s

    def stop(self, why: str, now: float, redone_s: float = 0.0) -> None:
        """Book that training stands still from now on, and that so many seconds of it are lost."""
        self.advance(now)
        if not self.why_stalled and redone_s > 0.0:
            lost_s = min(redone_s, now - self._going_since)
            self._move(lost_s * min(self.members, self.nodes) * (1.0 - self._stall_share), REDONE)
        self.why_stalled = why

    def go(self, members: float, now: float) -> None:
        """Book that training goes on from now on, with this many machines."""
        self.advance(now)
        self.members, self.why_stalled, self._going_since = members, "", now

    def lose_unsaved(self) -> None:
        """Book the work since the last checkpoint as lost."""
        self._move(self._unsaved, SINCE_CHECKPOINT)
        self._trained_s = self._unsaved = 0.0

    def save(self) -> None:
        """Book that all work so far is in a checkpoint."""
        self._trained_s = self._unsaved = 0.0

    def _move(self, work: float, account: str) -> None:
        lost = min(work, self.accounts[TRAINING])
        self.accounts[TRAINING] -= lost
        self.accounts[account] += lost
        self._unsaved = max(self._unsaved - lost, 0.0)

    def _draw(self, course: list[float], share: float, now: float) -> None:
        if share == 0.0:
            return
        width_s, at = self.span_s / BUCKETS, self.now
        while at < now:
            bucket = min(int(at / width_s), BUCKETS - 1)
            until = now if bucket == BUCKETS - 1 else min((bucket + 1) * width_s, now)
            until = max(until, at + 1e-6)
            course[bucket] += share * (until - at) / width_s
            at = until
