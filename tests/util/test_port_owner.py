"""Who has a port, in words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from holdfast.util.port_owner import foreign_listener, port_owner

LISTENS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_the_process_that_listens_at_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        owner = port_owner(port)
        assert owner is not None and owner[0] == os.getpid()
        assert foreign_listener(port).startswith(f"port {port} is in use by process {os.getpid()} (")
    assert port_owner(port) is None and foreign_listener(port) == ""


def test_a_client_of_a_port_does_not_own_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert port_owner(client.getsockname()[1]) is None


def test_a_master_of_holdfast_is_not_foreign() -> None:
    """Such as one that is too busy to answer at once."""
    command = [sys.executable, "-c", LISTENS, "holdfast", "master"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        owner = port_owner(port)
        assert owner is not None and owner[0] == process.pid
        assert foreign_listener(port) == ""
