"""A live master as a source: a real connection on loopback, a real journal behind it."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.errors import AuthenticationError, HoldfastError, JournalError, UsageError, WireError
from holdfast.journal import JournalEntry, read_entries
from holdfast.observe.remote import MasterSource
from holdfast.observe.source import follow, read
from holdfast.observe.token_file import Token
from holdfast.wire.control import Tls
from support.live_master import TOKEN, LiveAgent, LiveMaster

Page = list[JournalEntry]


def source(port: int, *, secret: str = TOKEN, **more: Any) -> MasterSource:
    return MasterSource("127.0.0.1", port, Token(secret, "the variable HOLDFAST_TOKEN"), **more)


def sentence_of(kind: type[HoldfastError], work: Callable[[], Coroutine[Any, Any, object]]) -> str:
    with pytest.raises(kind) as raised:
        asyncio.run(work())
    return str(raised.value)


async def next_page(pages: AsyncGenerator[Page, None]) -> Page:
    async with asyncio.timeout(30):
        return await anext(pages)


def test_reading_gives_what_the_journal_holds(tmp_path: Path) -> None:
    async def watch() -> Page:
        async with LiveMaster(tmp_path) as master:
            agent = await LiveAgent.join(master)
            entries = await read(source(master.port))
            assert entries == read_entries(master.path)
            await agent.close()
            return entries

    kinds = [type(entry.record).__name__ for entry in asyncio.run(watch())]
    assert kinds == ["JobCreated", "GatheringBegan", "TermBegan", "NodeJoined", "ViewFormed"]


def test_over_a_restart_of_the_master_nothing_is_lost_and_nothing_repeated(tmp_path: Path) -> None:
    async def watch() -> tuple[Page, Page]:
        async with LiveMaster(tmp_path) as master, aclosing(follow(source(master.port))) as pages:
            agent = await LiveAgent.join(master)
            seen = await next_page(pages)
            waiting = asyncio.create_task(next_page(pages))  # between two pages, as the master goes
            master.kill()
            await agent.close()
            await master.start()
            agent = await LiveAgent.join(master)
            await agent.started(view=1)
            seen += await waiting
            await agent.succeeded(view=1)
            async for page in pages:  # ends by itself: the job is over
                seen += page
            await agent.close()
            return seen, read_entries(master.path)

    seen, kept = asyncio.run(watch())
    assert [entry.seq for entry in seen] == list(range(1, len(kept) + 1))
    assert seen == kept
    assert [type(e.record).__name__ for e in kept].count("TermBegan") == 2


def test_records_that_were_written_while_nobody_watched_come_with_the_next_page(tmp_path: Path) -> None:
    async def watch() -> Page:
        async with LiveMaster(tmp_path) as master, aclosing(source(master.port).pages()) as pages:
            seen = await next_page(pages)
            for _ in range(3):  # three terms come and go without us
                master.kill()
                await master.start()
            while len(seen) < 6:
                seen += await next_page(pages)
            return seen

    assert [entry.seq for entry in asyncio.run(watch())] == [1, 2, 3, 4, 5, 6]


def test_a_wrong_token_gives_a_sentence_that_names_where_it_came_from(tmp_path: Path) -> None:
    async def watch() -> None:
        async with LiveMaster(tmp_path) as master:
            await read(source(master.port, secret="another-secret-altogether"))

    sentence = sentence_of(AuthenticationError, watch)
    assert "did not let us in with the token from the variable HOLDFAST_TOKEN" in sentence
    assert "another-secret" not in sentence, "a secret must not be printed"


def test_a_master_that_has_another_token_after_its_restart_ends_the_following(tmp_path: Path) -> None:
    async def watch() -> None:
        async with LiveMaster(tmp_path) as master, aclosing(source(master.port).pages()) as pages:
            await next_page(pages)
            master.kill()
            await master.start(token="another-secret-altogether")
            await next_page(pages)

    assert "did not let us in" in sentence_of(AuthenticationError, watch)


def test_where_nobody_listens_the_sentence_says_what_to_check() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else can take it either
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        sentence = sentence_of(WireError, lambda: read(source(port)))
    assert f"no master answers at 127.0.0.1:{port}" in sentence and "--endpoint" in sentence


def test_a_master_that_stays_away_is_given_up_with_the_last_record_that_came(tmp_path: Path) -> None:
    async def watch() -> None:
        async with LiveMaster(tmp_path) as master:
            pages = source(master.port, reconnect_timeout_s=0.2).pages()
            await next_page(pages)
            master.kill()
            await next_page(pages)

    sentence = sentence_of(WireError, watch)
    assert "has not come back" in sentence and "after record 3" in sentence


def test_a_master_with_another_journal_is_not_taken_for_the_same_job(tmp_path: Path) -> None:
    async def watch() -> None:
        async with LiveMaster(tmp_path) as master, aclosing(source(master.port).pages()) as pages:
            agent = await LiveAgent.join(master)
            seen = await next_page(pages)
            while len(seen) < 5:
                seen += await next_page(pages)
            master.kill()
            await agent.close()
            for file in master.path.parent.iterdir():
                file.unlink()
            await master.start()
            await next_page(pages)

    assert "another journal than before" in sentence_of(JournalError, watch)


def test_a_job_that_was_named_must_be_the_one_that_answers(tmp_path: Path) -> None:
    async def watch(wanted: str) -> Page:
        async with LiveMaster(tmp_path, "train-7") as master:
            return await read(source(master.port, wanted=wanted))

    assert asyncio.run(watch("train"))
    assert "runs job train-7, not eval" in sentence_of(UsageError, lambda: watch("eval"))


def test_over_tls_the_master_is_reached_with_its_certificate_and_not_without(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)

    async def watch(chosen: Tls | None) -> Page:
        async with LiveMaster(tmp_path, tls=tls) as master:
            return await read(source(master.port, tls=chosen))

    assert asyncio.run(watch(tls))
    assert "check the address and the TLS flags" in sentence_of(WireError, lambda: watch(None))


def self_signed(directory: Path) -> Tls:
    """A certificate for 127.0.0.1 and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (directory / "tls.crt").write_bytes(certificate.public_bytes(pem))
    (directory / "tls.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return Tls(str(directory / "tls.crt"), str(directory / "tls.key"))


# --- the token
