"""The faults of the online soak, and which of them a job must survive at a moment.

`lost` are the ranks whose process was ended since all ranks last committed a step. A further one is only chosen if a
complete copy of the state stays in memory without it. The same rank may die again while it is being replaced, by
another signal: the ladder gives up on a failure that comes back as it was, and it should.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from processes import kill, marked_pids

from holdfast.core.views import ring_partner

if TYPE_CHECKING:
    from online import Campaign

DEATHS_MAX, RETRIES_MAX = 3, 2
"""In one round: the ladder tries no rung more than three times."""
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
READY_TIMEOUT_S = 30.0
FAULTS = {
    "kill_one": 6,
    "kill_two": 2,
    "kill_stranger": 2,
    "stop_stranger": 1,
    "hang": 1,
    "cut": 3,
    "raise_retryable": 2,
    "fail": 1,
    "kill_master": 2,
    "kill_fork_server": 1,
    "kill_store_host": 1,
    "pause_agent": 1,
    "kill_node": 2,
}
"""How often each is done, by the names of the methods below."""


class Fault(NamedTuple):
    """What was done, when (wall clock), in which round."""

    round: int
    at: float
    what: str


class Hurting:
    def __init__(self, campaign: Campaign, chance: random.Random) -> None:
        self.campaign, self.chance = campaign, chance
        self.diary: list[Fault] = []
        self.rounds = 0
        self.pids: dict[int, int] = {}
        """The process of each rank when the round began."""
        self.nodes: dict[str, set[int]] = {}
        """The ranks of each node then."""
        self.lost: set[int] = set()
        self.deaths = self.retries = self.blows = 0

    def wait_until_ready(self) -> None:
        """The spares are there too."""
        everybody = self.campaign.ranks + int(self.campaign.options.spares)
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while len(self.campaign.script_pids()) < everybody and time.monotonic() < give_up_at:
            time.sleep(0.05)

    def begin_round(self) -> None:
        """All is well: who is where?"""
        self.rounds += 1
        self.lost = set()
        self.deaths = self.retries = self.blows = 0
        self.campaign.ledger.read_on()
        self.pids = self.campaign.ledger.processes(self.campaign.ranks)
        members = self.campaign.job().members
        self.nodes = {n: set(range(m.first_rank, m.first_rank + m.workers)) for n, m in members.items()}

    def hit(self) -> None:
        """One fault, of those that are possible now."""
        options = self.campaign.options
        wanted, unwanted = set(filter(None, options.only.split(","))), set(options.without.split(","))
        left = {
            name: weight for name, weight in FAULTS.items() if name not in unwanted and (name in wanted or not wanted)
        }
        while left:
            name = self.chance.choices(list(left), weights=list(left.values()))[0]
            del left[name]
            at = time.time()
            if what := getattr(self, name)():
                self.diary.append(Fault(self.rounds, at, what))
                return

    # --- who may be hurt

    def survives(self, ranks: Collection[int]) -> bool:
        """Whether a complete copy of the state is left without these ranks."""
        world = self.campaign.ranks
        match self.campaign.options.model:
            case "ddp":
                return len(ranks) < world
            case "hsdp":
                shards = world // 2
                return all({rank, (rank + shards) % world} - set(ranks) for rank in range(world))
        first = tuple(sorted(min(of_node) for of_node in self.nodes.values()))
        return all(rank not in ranks or ring_partner(first, world, rank, 1) not in ranks for rank in range(world))

    def victims(self, count: int) -> list[int]:
        """Ranks that may die at once, or none."""
        free = sorted(set(self.pids) - self.lost)
        self.chance.shuffle(free)
        for start in range(len(free)):
            chosen = [*free[start:], *free[:start]][:count]
            if len(chosen) == count and self.may_die(chosen):
                self.lost |= set(chosen)
                self.deaths += count
                return chosen
        return []

    def may_die(self, ranks: Collection[int]) -> bool:
        return self.deaths + len(ranks) <= DEATHS_MAX and self.survives(self.lost | set(ranks))

    def signal_to(self, pids: list[int], number: int) -> str:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        return signal.Signals(number).name

    def next_signal(self) -> signal.Signals:
        """Another one with each blow of a round."""
        self.blows += 1
        return SIGNALS[min(self.blows, len(SIGNALS)) - 1]

    # --- faults: what was done, or nothing

    def kill_one(self) -> str:
        return self._kill(1)

    def kill_two(self) -> str:
        return self._kill(2)

    def _kill(self, count: int) -> str:
        ranks = self.victims(count)
        how = self.signal_to([self.pids[rank] for rank in ranks], self.next_signal()) if ranks else ""
        return f"{how} to rank {' and '.join(map(str, ranks))}" if ranks else ""

    def strangers(self) -> list[int]:
        """Processes of the script that had no rank when the round began: spares, and who replaces the dead."""
        return [pid for pid in self.campaign.script_pids() if pid not in self.pids.values()]

    def kill_stranger(self) -> str:
        found = self.strangers()
        if not found or self.deaths >= DEATHS_MAX:
            return ""
        self.deaths += 1
        pid = self.chance.choice(found)
        return f"{self.signal_to([pid], self.next_signal())} to newcomer or spare {pid}"

    def stop_stranger(self) -> str:
        found = self.strangers()
        if not found or self.deaths >= DEATHS_MAX:
            return ""
        self.deaths += 1
        pid = self.chance.choice(found)
        return f"{self.signal_to([pid], signal.SIGSTOP)} to newcomer or spare {pid}"

    def hang(self) -> str:
        ranks = self.victims(1)
        how = self.signal_to([self.pids[rank] for rank in ranks], signal.SIGSTOP)
        return f"{how} to rank {ranks[0]}" if ranks else ""

    def fail(self) -> str:
        letter, how = self.chance.choice([("b", "a bug"), ("x", "an exit with 3")])
        ranks = self.victims(1)
        return f"{how} in rank {ranks[0]}" if ranks and self.whisper(self.pids[ranks[0]], letter) else ""

    def cut(self) -> str:
        return self._disturb("c", "connections cut of")

    def raise_retryable(self) -> str:
        return self._disturb("r", "retryable error in")

    def _disturb(self, letter: str, how: str) -> str:
        living = sorted(set(self.pids) - self.lost)
        if not living or self.retries >= RETRIES_MAX:
            return ""
        rank = self.chance.choice(living)
        self.retries += 1
        return f"{how} rank {rank}" if self.whisper(self.pids[rank], letter) else ""

    def whisper(self, pid: int, letter: str) -> bool:
        try:
            ear = os.open(self.campaign.work / "ears" / str(pid), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False  # nobody listens: it has ended
        os.write(ear, letter.encode())
        os.close(ear)
        return True

    def kill_master(self) -> str:
        return self._kill_service("holdfast master", "master")

    def kill_fork_server(self) -> str:
        return self._kill_service("holdfast: fork server", "fork server")

    def kill_store_host(self) -> str:
        return self._kill_service("holdfast: store host", "store host")

    def _kill_service(self, words: str, name: str) -> str:
        found = []
        for pid in marked_pids({"BENCH_RUN": self.campaign.run.mark}):
            try:
                if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    found.append(pid)
            except OSError:
                continue
        if not found:
            return ""
        kill([self.chance.choice(found)])
        return f"{name} killed"

    def pause_agent(self) -> str:
        node = self.chance.choice(self.campaign.nodes)
        agent = self.campaign.agents[node]
        if agent.poll() is not None:
            return ""
        duration_s = self.chance.choice([0.1, 0.5, 1.0])
        agent.send_signal(signal.SIGSTOP)
        self.campaign.later.append((time.monotonic() + duration_s, lambda: agent.send_signal(signal.SIGCONT)))
        return f"agent {node} stopped for {duration_s} s"

    def kill_node(self) -> str:
        """All of a member's processes; it comes back. Where ranks must stay, another node must stand by for it."""
        campaign = self.campaign
        if campaign.options.nodes < 2:
            return ""
        node = self.chance.choice(sorted(self.nodes))
        ranks = self.nodes[node]
        if campaign.agents_are_missing() or not self.survives(self.lost | ranks):
            return ""
        others = [name for name in campaign.nodes if name not in self.nodes]
        ready = [name for name in others if len(campaign.script_pids(name)) >= campaign.workers]
        if not campaign.options.elastic and not ready:
            return ""
        self.lost |= ranks
        self.deaths = DEATHS_MAX
        campaign.agents_killed += 1
        campaign.run.kill_node(node)
        back_s = self.chance.uniform(0.0, 2.0)
        campaign.later.append((time.monotonic() + back_s, lambda: campaign.start_agent(node)))
        return f"node {node} killed, back in {back_s:.1f} s"
