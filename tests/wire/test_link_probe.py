"""Probes of the link to a real bulk port, and to what is none."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from holdfast.errors import WireError
from holdfast.wire.link_probe import probe_link
from support.bulks import TOKEN, bulk_server

LONG_S = 30.0
SHORT_S = 0.3


def probe(port: int, *, token: str = TOKEN, timeout_s: float = LONG_S, host: str = "127.0.0.1") -> float | None:
    return asyncio.run(probe_link(host, port, token=token, tls=None, timeout_s=timeout_s))


def test_a_probe_says_how_long_it_took_and_the_port_serves_on(tmp_path: Path) -> None:
    with bulk_server(tmp_path) as (server, _):
        for _ in range(3):
            taken_s = probe(server.port)
            assert taken_s is not None and 0 < taken_s < LONG_S


def test_a_machine_whose_agent_does_not_answer_or_is_not_there_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert probe(silent.getsockname()[1], timeout_s=SHORT_S) == SHORT_S
        port = silent.getsockname()[1]
    assert probe(port, timeout_s=SHORT_S) == SHORT_S, "its kernel refuses: it is there"


def test_a_machine_to_which_there_is_no_way_is_not_reached() -> None:
    assert probe(1, host="no-such-host.invalid") is None


def test_an_agent_of_another_job_refuses(tmp_path: Path) -> None:
    with bulk_server(tmp_path) as (server, _), pytest.raises(WireError):
        probe(server.port, token="another token, of another job")
