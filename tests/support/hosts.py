"""Hosts for tests: network namespaces joined by a switch, with links that can be cut and healed.

    with hosts(3) as net:                        three hosts, 10.77.0.1 and so on
        agent = net[0].start_agent([...], state_dir=...)
        net[1].cut()                             silently: no FIN, no RST, nothing
        net[1].heal()

Each host has its own network and its own name; the files, the kernel and the clock are the machine's. The switch is a
bridge in a namespace of its own: the machine's own network is never touched. Packets are dropped where they arrive, so
that the sender's kernel does not know, as on a real network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from support.jobs import AgentProcess, is_alive, marker, start_agent, wait_for

PROGRAMS = ("ip", "iptables", "ss", "unshare")
RUN = (sys.executable, "-m", "holdfast", "run", "--log-format", "json")
MASTER = (sys.executable, "-m", "holdfast", "master", "--log-format", "json")
WITH_OWN_NAME = ("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"')
"""Execs, like `ip netns exec` before it: the process id stays that of the agent."""
SLOW_CABLE = Path(__file__).parents[1] / "e2e" / "lab" / "slow_cable.py"
LINK = "eth0"
"""The interface of every host."""


def why_no_delays() -> str:
    """Why packets cannot be delayed here; empty if they can."""
    return why_not() or ("" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no TUN devices here")


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"not installed: {', '.join(missing)} (tests/install-packages.sh)"
    probe = ["unshare", "--net", "--uts", "iptables", "-w", "-A", "INPUT", "-j", "DROP"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no namespaces or no packet filter here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Rule:
    """What a host does with the packets of another."""

    sender: Host
    receiver: Host
    target: Literal["DROP", "REJECT"]
    share: float = 1.0
    """Of the packets, at random."""

    def words(self) -> list[str]:
        words = ["INPUT", "-i", LINK, "-s", f"{self.sender.address}/32"]
        if self.target == "REJECT":
            return [*words, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"]
        if self.share < 1.0:
            words += ["-m", "statistic", "--mode", "random", "--probability", f"{self.share}"]
        return [*words, "-j", "DROP"]

    def packets(self) -> int:
        """How many it has met."""
        listed = self.receiver.run("iptables", "-w", "-v", "-S", "INPUT").splitlines()
        lines = [line.split() for line in listed if f"-j {self.target}" in line]
        mine = next(line for line in lines if f"{self.sender.address}/32" in line)
        return int(mine[mine.index("-c") + 1])


@dataclass(eq=False)
class Host:
    """One machine of the network."""

    namespace: str
    address: str
    port: str
    """Of the switch, where its cable ends."""
    net: Network = field(repr=False)

    def run(self, *words: str) -> str:
        """The output of a command on this host."""
        return run("ip", "netns", "exec", self.namespace, *words)

    def start_agent(
        self,
        args: Sequence[str],
        *,
        state_dir: Path,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = RUN,
    ) -> AgentProcess:
        """`holdfast run ARGS` on this host, or another command."""
        named = (*WITH_OWN_NAME, self.namespace, *command)
        return start_agent(args, state_dir=state_dir, env=env, netns=self.namespace, command=named)

    def pids(self) -> list[int]:
        """All processes on this host."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.namespace).split()]

    def kill_all(self) -> None:
        """SIGKILL to every process; first all are stopped, so that none can tell of another's end."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        wait_for(lambda: not any(map(is_alive, self.pids())), what=f"the end of all processes on {self.namespace}")

    def listeners(self) -> set[tuple[str, int]]:
        """Addresses and ports on which somebody listens here."""
        lines = self.run("ss", "-H", "-l", "-t", "-n").splitlines()
        return {_endpoint(line.split()[3]) for line in lines}

    def connections_to(self, address: str, port: int) -> set[int]:
        """The local ports of this host's established connections to there."""
        lines = self.run("ss", "-H", "-t", "-n", "state", "established").splitlines()
        words = [line.split() for line in lines]
        return {_endpoint(local)[1] for _, _, local, peer, *_ in words if _endpoint(peer) == (address, port)}

    # --- faults

    def cut(self, how: Literal["drop", "cable"] = "drop") -> list[Rule]:
        """Nothing comes from here or gets here any more: lost on the way, or the cable is out."""
        if how == "cable":
            self.net.switch("link", "set", self.port, "down")
            return []
        pairs = [pair for other in self.net.others(self) for pair in ((self, other), (other, self))]
        return [cut_between(*pair) for pair in pairs]

    def heal(self) -> None:
        """Undo all faults of this host."""
        self.net.switch("link", "set", self.port, "up")
        for rule in [rule for rule in self.net.rules if self in (rule.sender, rule.receiver)]:
            self.net.remove(rule)


@dataclass(eq=False)
class Network:
    """Hosts on one switch."""

    name: str
    hosts: list[Host] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def others(self, host: Host) -> list[Host]:
        return [other for other in self.hosts if other is not host]

    def switch(self, *words: str) -> None:
        run("ip", "-n", self.name, *words)

    def make(self, count: int) -> None:
        run("ip", "netns", "add", self.name)
        self.switch("link", "add", "bridge", "type", "bridge")
        self.switch("link", "set", "bridge", "up")
        for number in range(1, count + 1):
            self._plug_in(number)

    def _plug_in(self, number: int) -> None:
        host = Host(f"{self.name}-{number}", f"10.77.0.{number}", f"port{number}", self)
        run("ip", "netns", "add", host.namespace)
        self.hosts.append(host)
        pair = ("type", "veth", "peer", "name", host.port, "netns", self.name)
        run("ip", "link", "add", LINK, "netns", host.namespace, *pair)
        run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", LINK)
        for name in ("lo", LINK):
            run("ip", "-n", host.namespace, "link", "set", name, "up")
        self.switch("link", "set", host.port, "master", "bridge", "up")

    def add(self, rule: Rule) -> Rule:
        rule.receiver.run("iptables", "-w", "-I", *rule.words())
        self.rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        rule.receiver.run("iptables", "-w", "-D", *rule.words())
        self.rules.remove(rule)

    def remove_all(self) -> None:
        """Whatever is there, in whatever state."""
        for namespace in [host.namespace for host in self.hosts] + [self.name]:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Network]:
    """A network of this many hosts, gone afterwards; processes that are left on them are the leak guard's."""
    net = Network(f"hf{marker()}")
    try:
        net.make(count)
        yield net
    finally:
        net.remove_all()


def cut_between(sender: Host, receiver: Host) -> Rule:
    """Silently lose what one host sends to the other; the way back stays open. Host.heal() undoes it."""
    return sender.net.add(Rule(sender, receiver, "DROP"))


def lose_between(one: Host, other: Host, share: float) -> list[Rule]:
    """Lose a share of what the two send to each other. Host.heal() undoes it."""
    return [one.net.add(Rule(sender, receiver, "DROP", share)) for sender, receiver in ((one, other), (other, one))]


@contextlib.contextmanager
def delay_between(one: Host, other: Host, delay_s: float) -> Iterator[None]:
    """What the two send to each other comes later, by e2e/lab/slow_cable.py; others' packets do not."""
    ends = (one.namespace, other.namespace, one.address, other.address)
    cable = subprocess.Popen([sys.executable, str(SLOW_CABLE), *ends, str(delay_s)], stdout=subprocess.PIPE)
    assert cable.stdout is not None
    try:
        assert cable.stdout.readline() == b"plugged in\n"
        yield
    finally:
        cable.kill()
        cable.wait()
        cable.stdout.close()


def reset_between(sender: Host, receiver: Host) -> Rule:
    """Answer what one host sends to the other with a TCP reset: the sender's connections break, the other end of them
    hears nothing. Host.heal() undoes it."""
    return sender.net.add(Rule(sender, receiver, "REJECT"))


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


def _endpoint(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    plain = address.partition("%")[0].strip("[]")
    return plain.removeprefix("::ffff:"), int(port)  # an IPv4 peer of an IPv6 socket
