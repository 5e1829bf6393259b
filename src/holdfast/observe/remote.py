"""A live master as a source of records: `--endpoint HOST:PORT`.

The master sends its journal from a given number on, and goes on. When the connection breaks, the source reconnects and
asks from the number it has, so a restart of the master neither loses nor repeats a record. A master that stays away was
either lost or has finished between two pages; from here there is no telling which, so the error says both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec

from holdfast.core.records import DurableRecord, JobCreated
from holdfast.errors import AuthenticationError, JournalError, UsageError, WireError
from holdfast.journal import JournalEntry
from holdfast.observe.jobs import matches
from holdfast.observe.token_file import Token
from holdfast.wire.control import ClientConnection, connect
from holdfast.wire.control_messages import Page, Watch
from holdfast.wire.tls import Tls

CONNECT_TIMEOUT_S = 5.0
RECONNECT_PAUSE_S = 0.1
RECONNECT_TIMEOUT_S = 30.0
"""A killed master is back in about a second; this is long enough for a busy machine."""

_decoder: msgspec.json.Decoder[DurableRecord] = msgspec.json.Decoder(DurableRecord)


class MasterSource:
    """A master's journal over the network."""

    def __init__(
        self,
        host: str,
        port: int,
        token: Token,
        tls: Tls | None = None,
        *,
        wanted: str | None = None,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
    ) -> None:
        self.address = f"{host}:{port}"
        self._host, self._port, self._token, self._tls = host, port, token, tls
        self._wanted = wanted
        self._reconnect_timeout_s = reconnect_timeout_s

    async def pages(self) -> AsyncGenerator[list[JournalEntry], None]:
        """Return everything so far, then more as it comes, without end."""
        connection, seen = await self._open(0), 0
        try:
            while True:
                try:
                    page = await connection.receive()
                except WireError as error:
                    await connection.close()
                    connection = await self._reopen(seen, error)
                    continue
                if entries := self._fresh(page, seen):
                    self._check_job(entries[0])
                    seen = entries[-1].seq
                    yield entries
        finally:
            await connection.close()

    async def _open(self, seen: int) -> ClientConnection:
        try:
            return await self._watch(seen)
        except AuthenticationError as error:
            raise AuthenticationError(
                f"the master at {self.address} did not let us in with the token from {self._token.place}: {error}"
            ) from error
        except WireError as error:
            raise WireError(
                f"no master answers at {self.address} ({error}): check the address and the TLS flags, or read the"
                " journal on the master's machine, without --endpoint"
            ) from error

    async def _watch(self, seen: int) -> ClientConnection:
        connection = await connect(
            self._host,
            self._port,
            token=self._token.secret,
            role="watcher",
            tls=self._tls,
            timeout_s=CONNECT_TIMEOUT_S,
        )
        try:
            await connection.send(Watch(seen))
        except WireError:
            await connection.close()
            raise
        return connection

    async def _reopen(self, seen: int, broke: WireError) -> ClientConnection:
        give_up_at = time.monotonic() + self._reconnect_timeout_s
        while True:
            try:
                return await self._open(seen)
            except AuthenticationError:
                raise
            except WireError:
                if time.monotonic() >= give_up_at:
                    raise WireError(
                        f"the master at {self.address} went away ({broke}) and has not come back in"
                        f" {self._reconnect_timeout_s:.0f} s, after record {seen}: the job may be over, or its master"
                        " lost; its machine has the journal"
                    ) from broke
                await asyncio.sleep(RECONNECT_PAUSE_S)  # a port that is closed says nothing when it opens

    def _fresh(self, page: object, seen: int) -> list[JournalEntry]:
        """Return the page's records, each with its number. They must go on exactly where the last page ended."""
        if not isinstance(page, Page):
            raise WireError(f"the master at {self.address} sent something that is not for watchers")
        first = page.last_seq - len(page.records) + 1
        if first != seen + 1:
            raise JournalError(
                f"the master at {self.address} has another journal than before: it goes on with record {first}, though"
                f" {seen} had been read"
            )
        return [JournalEntry(seq, self._decode(seq, body)) for seq, body in enumerate(page.records, first)]

    def _decode(self, seq: int, body: str) -> DurableRecord:
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise JournalError(
                f"record {seq} of the master at {self.address} cannot be read ({error}): use its version of Holdfast"
            ) from error

    def _check_job(self, first: JournalEntry) -> None:
        record = first.record
        if self._wanted and isinstance(record, JobCreated) and not matches(record.job_id, self._wanted):
            raise UsageError(f"the master at {self.address} runs job {record.job_id}, not {self._wanted}")
