"""Snapshots between hosts, over a network that can be cut (support/hosts.py)."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshots.test_replica_kills import newest
from support.bulk_process import tell, word
from support.hosts import Host, hosts, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made"),
    pytest.mark.usefixtures("leak_guard"),
]
PROCESS = Path(__file__).parents[1] / "support" / "replica_process.py"


@contextlib.contextmanager
def started_on(host: Host, *words: str) -> Iterator[subprocess.Popen[str]]:
    inside = ("ip", "netns", "exec", host.namespace, sys.executable, str(PROCESS), *words)
    environment = os.environ | {"PYTHONPATH": str(PROCESS.parents[1])}
    process = subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    with process:
        yield process
        process.kill()


def test_a_network_that_is_cut_in_the_middle_leaves_a_whole_image_and_heals(tmp_path: Path) -> None:
    root = tmp_path / "replicas"
    with (
        hosts(2) as net,
        started_on(net[1], "hold", str(root), net[1].address) as holder,
        started_on(net[0], "send", str(tmp_path / "own"), "1") as sender,
    ):
        tell(sender, f"{net[1].address} {word(holder, 'port')}")
        safe = int(word(sender, "safe"))
        for _ in range(2):
            net[1].cut()
            safe = until_given_up(sender, safe)
            assert newest(root) >= (1, safe)
            net[1].heal()
            assert int(word(sender, "safe")) > safe


def until_given_up(sender: subprocess.Popen[str], safe: int) -> int:
    """Until it says that its partner cannot be reached; the last step that was safe."""
    assert sender.stdout is not None
    for line in sender.stdout:
        if "cannot be copied to b" in line:
            return safe
        if line.startswith("safe "):
            safe = int(line.split()[1])
    raise AssertionError("it ended")


@pytest.mark.parametrize("is_outside", [False, True])
def test_on_loopback_nobody_outside_can_knock(tmp_path: Path, is_outside: bool) -> None:
    knock = "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))"
    with hosts(2) as net:
        address = net[1].address if is_outside else "127.0.0.1"
        with started_on(net[1], "hold", str(tmp_path), address) as holder:
            port = word(holder, "port")
            assert (address, int(port)) in net[1].listeners()
            answer = int(net[0].run(sys.executable, "-c", knock, net[1].address, port))
        assert answer == (0 if is_outside else errno.ECONNREFUSED)
