"""Who does not know the token is turned away, whatever it sends; what is sealed cannot be forged."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore

from holdfast.errors import AuthenticationError, UsageError, WireError
from holdfast.wire import control
from holdfast.wire.auth import (
    PROTOCOL_VERSION,
    Challenge,
    ClientHandshake,
    Opening,
    Proof,
    Refusal,
    Role,
    ServerHandshake,
    new_nonce,
)
from holdfast.wire.control import Server, Tls, connect
from holdfast.wire.control_messages import Acknowledge, Heartbeat, Page
from holdfast.wire.frame_stream import FrameStream
from holdfast.wire.frames import ANSWER, LENGTH, PREAMBLE, encode, frame_of

TOKEN = "a token of more than sixteen characters"


class Echo:
    """A server that answers each heartbeat with its term, and remembers whom it turned away."""

    def __init__(self, tls: Any = None) -> None:
        self.strangers: list[Any] = []
        self.connections = 0
        self.server = Server("127.0.0.1", 0, token=TOKEN, tls=tls, stranger=self.on_stranger)

    def on_stranger(self, peer: Any, why: Any) -> None:
        self.strangers.append((peer, why))

    async def handle(self, connection: Any) -> None:
        self.connections += 1
        while (message := await connection.receive()) is not None:
            connection.send(Acknowledge(message.term))

    async def __aenter__(self) -> Any:
        self.port = await self.server.start(self.handle)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.server.stop(0)

    async def connect(self, token: Any = TOKEN, tls: Any = None, host: str = "127.0.0.1") -> Any:
        return await connect(host, self.port, token=token, role="agent", tls=tls, timeout_s=5.0)


class RawClient:
    """A client that sends what the test wants it to, after the preamble."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, port: int, preamble: bytes = PREAMBLE) -> AsyncIterator[RawClient]:
        client = cls()
        client.reader, client.writer = await asyncio.open_connection("127.0.0.1", port)
        client.writer.write(preamble)
        try:
            yield client
        finally:
            client.writer.close()

    def send(self, payload: Any) -> None:
        self.writer.write(frame_of(payload))

    async def receive(self) -> Any:
        async with asyncio.timeout(10):
            (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            return msgspec.msgpack.decode(await self.reader.readexactly(length), type=Challenge | Proof | Refusal)

    async def refusal(self) -> Any:
        """Return the sentence with which the server ends the connection."""
        refusal = await self.receive()
        assert isinstance(refusal, Refusal)
        assert await self.reader.read() == b"", "nothing comes after a refusal"
        return refusal.why


def run(scenario: Any) -> Any:
    return asyncio.run(scenario())


async def say(connection: Any, term: Any) -> Any:
    await connection.send(Heartbeat(term))
    return (await connection.receive()).number


def test_both_ends_that_know_the_token_talk() -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            connection = await echo.connect()
            assert [await say(connection, n) for n in range(5)] == list(range(5))
            await connection.close()
            assert echo.strangers == []

    run(scenario)


def test_a_client_with_another_token_is_refused_and_logged_by_neither_side_trusting_the_other() -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            with pytest.raises(AuthenticationError, match="does not know the job's token"):
                await echo.connect(token="another token of enough length")
            assert echo.connections == 0

    run(scenario)


def test_a_client_that_does_not_know_the_token_is_refused_and_gets_no_proof_of_the_servers() -> None:
    async def scenario() -> None:
        async with Echo() as echo, RawClient.connected(echo.port) as client:
            client.send(encode(Opening(version=PROTOCOL_VERSION, role="agent", nonce=new_nonce())))
            assert isinstance(await client.receive(), Challenge)
            client.send(encode(Proof(b"x" * 32)))
            assert "does not know the job's token" in await client.refusal()
            assert echo.connections == 0
            assert "does not know the job's token" in echo.strangers[0][1]

    run(scenario)


@pytest.mark.parametrize("claimed", ["watcher", "agent"])
def test_a_role_or_a_version_that_was_changed_on_the_way_is_refused(claimed: Role) -> None:
    """Both are in the transcript that is proved."""
    from holdfast.wire.auth import derive, transcript_of

    async def scenario() -> None:
        async with Echo() as echo, RawClient.connected(echo.port) as client:
            sent = Opening(version=PROTOCOL_VERSION, role=claimed, nonce=new_nonce())
            meant = msgspec.structs.replace(sent, role="agent")
            client.send(encode(sent))
            challenge = await client.receive()
            keys = derive(TOKEN, transcript_of(encode(meant), encode(challenge), b""))
            client.send(encode(Proof(keys.client_proof)))
            if claimed == "agent":
                assert isinstance(await client.receive(), Proof), "the same bytes unchanged are accepted"
            else:
                assert "does not know the job's token" in await client.refusal()

    run(scenario)


@pytest.mark.parametrize(
    "opening",
    [
        b"",
        b"\xc1garbage",
        os.urandom(300),
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION, "role": "king", "nonce": b"x" * 16}),
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION, "role": "peer", "nonce": b"x" * 16}),
        msgspec.msgpack.encode({"version": 99, "role": "agent", "nonce": b"x" * 16}),
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION, "role": "agent", "nonce": b"short"}),
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION, "role": "A" * 3_000, "nonce": b"x" * 16}),
        b"\xa5\xff\xfe\xfd\xfc\xfb",
        b"\x83\xa7version\x02\xa4role\xa5\xff\xfe\xfd\xfc\xfb\xa5nonce\xc4\x01x",
        b"\x91" * 4_000,
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION, "role": "agent", "nonce": b"x" * 16})[:-3],
    ],
    ids=["empty", "junk", "random", "role", "other port's role", "version", "nonce", "long role", "no UTF-8",
         "role is no UTF-8", "deep", "truncated"],
)  # fmt: skip
def test_a_malformed_opening_gets_an_error_and_a_line(opening: Any) -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            async with RawClient.connected(echo.port) as client:
                client.send(opening)
                why = await client.refusal()
            assert len(why) <= 200 and [text for _, text in echo.strangers] == [why]
            assert echo.connections == 0
            good = await echo.connect()
            assert await say(good, 7) == 7
            await good.close()

    run(scenario)


def test_a_frame_that_is_too_long_is_refused_before_it_is_allocated() -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            for length in (4_097, 2**32 - 1):
                async with RawClient.connected(echo.port) as client:
                    client.writer.write(LENGTH.pack(length))
                    assert "were announced" in (why := await client.refusal()) or "was announced" in why
            assert len(echo.strangers) == 2

    run(scenario)


def test_a_message_after_the_handshake_that_is_not_ours_ends_that_connection_only() -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            bad, good = await echo.connect(), await echo.connect()
            bad._stream.write(bad._seal.close(b"\xc1not a message"))
            with pytest.raises(WireError):
                await bad.receive()
            assert await say(good, 3) == 3
            assert "cannot be decoded" in echo.strangers[0][1]
            await bad.close()
            await good.close()

    run(scenario)


def test_a_replayed_or_changed_frame_is_refused() -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            connection = await echo.connect()
            frame = connection._seal.close(msgspec.msgpack.encode(Heartbeat(1)))
            connection._stream.write(frame)
            assert (await connection.receive()).number == 1
            connection._stream.write(frame)
            with pytest.raises(WireError, match="seal"):
                await connection.receive()
            await connection.close()

    run(scenario)


def test_nobody_there_and_a_server_that_is_none_are_sentences() -> None:
    async def scenario() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            with pytest.raises(WireError):
                await connect("127.0.0.1", port, token=TOKEN, role="agent", tls=None, timeout_s=2.0)
            listener.listen()
            with pytest.raises(WireError, match="no answer"):
                await connect("127.0.0.1", port, token=TOKEN, role="agent", tls=None, timeout_s=0.3)

    run(scenario)


def test_a_port_in_use_is_a_sentence() -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            other = Server("127.0.0.1", echo.port, token=TOKEN, tls=None, stranger=echo.on_stranger)
            with pytest.raises(WireError, match="in use"):
                await other.start(echo.handle)
            await other.stop(0)

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01",
     b"HFBULK1\n", PREAMBLE[:3] + b"x"],
)  # fmt: skip
def test_bytes_that_are_not_our_protocol_get_an_answer_and_a_line(sent: Any) -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
            peer = "{}:{}".format(*writer.get_extra_info("sockname"))
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            assert answer == ANSWER
            assert len(echo.strangers) == 1 and echo.strangers[0][0] == peer
            good = await echo.connect()
            assert await say(good, 5) == 5
            await good.close()

    run(scenario)


def test_the_log_names_the_address_of_a_client_without_the_token() -> None:
    async def scenario() -> None:
        async with Echo() as echo, RawClient.connected(echo.port) as client:
            client.send(b"\xc1")
            await client.refusal()
            assert echo.strangers[0][0] == "{}:{}".format(*client.writer.get_extra_info("sockname"))

    run(scenario)


def test_a_connection_that_says_nothing_and_leaves_is_no_stranger() -> None:
    """A look whether the port is open; others that leave early are."""

    async def scenario() -> None:
        async with Echo() as echo:
            _, writer = await asyncio.open_connection("127.0.0.1", echo.port)
            writer.close()
            async with RawClient.connected(echo.port) as client:
                client.writer.write_eof()
                assert "before it proved itself" in await client.refusal()
            assert len(echo.strangers) == 1

    run(scenario)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A CA, and a certificate for 127.0.0.1 by it, and one by a stranger's CA."""
    directory = tmp_path_factory.mktemp("certificates")
    for ca_name, leaf_name in (("ca", "node"), ("other-ca", "other")):
        _make_certificates(directory, ca_name, leaf_name)
    return directory


def _make_certificates(directory: Path, ca_name: Any, leaf_name: Any) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def build(subject: Any, key: Any, issuer: Any, issuer_key: Any, is_ca: Any) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(address, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        return builder.sign(issuer_key, hashes.SHA256())

    def save(stem: Any, certificate: Any, key: Any) -> None:
        pem = serialization.Encoding.PEM
        (directory / f"{stem}.crt").write_bytes(certificate.public_bytes(pem))
        encoded = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (directory / f"{stem}.key").write_bytes(encoded)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    save(ca_name, build(ca_name, ca_key, ca_name, ca_key, True), ca_key)
    save(leaf_name, build(leaf_name, key, ca_name, ca_key, False), key)


def tls_of(directory: Path, leaf: Any, ca: str = "") -> Any:
    root = str(directory / f"{ca}.crt") if ca else ""
    return Tls(str(directory / f"{leaf}.crt"), str(directory / f"{leaf}.key"), root)


def test_mutual_tls_lets_in_who_has_a_certificate_of_the_ca_only(certificates: Any) -> None:
    ours, stranger = tls_of(certificates, "node", "ca"), tls_of(certificates, "other", "other-ca")

    async def scenario() -> None:
        async with Echo(tls=ours) as echo:
            connection = await echo.connect(tls=ours)
            assert await say(connection, 4) == 4
            await connection.close()
            for wrong in (None, stranger, tls_of(certificates, "other", "ca")):
                with pytest.raises(WireError):
                    await echo.connect(tls=wrong)
            assert echo.connections == 1
            async with asyncio.timeout(10):
                while len(echo.strangers) < 3:
                    await asyncio.sleep(0.01)

    run(scenario)


def test_a_certificate_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot read /nowhere\.crt"):
        Tls("/nowhere.crt", "/nowhere.key").read()


def test_plain_text_at_a_tls_port_gets_the_same_answer(certificates: Any) -> None:
    async def scenario() -> None:
        async with Echo(tls=tls_of(certificates, "node", "ca")) as echo:
            async with RawClient.connected(echo.port, b"GET / HTTP/1.1\r\n\r\n") as client:
                assert await client.reader.read() == ANSWER
            with pytest.raises(WireError, match="same TLS flags"):
                await echo.connect(tls=None)
            assert len(echo.strangers) == 2

    run(scenario)


def test_a_certificate_for_another_host_is_not_accepted(certificates: Any) -> None:
    ours = tls_of(certificates, "node", "ca")

    async def scenario() -> None:
        async with Echo(tls=ours) as echo:
            with pytest.raises(WireError, match=r"certificate .* is not accepted"):
                await echo.connect(tls=ours, host="localhost")

    run(scenario)


def test_a_server_certificate_is_enough_without_a_ca(certificates: Any) -> None:
    ours = tls_of(certificates, "node")

    async def scenario() -> None:
        async with Echo(tls=ours) as echo:
            connection = await echo.connect(tls=ours)
            assert await say(connection, 6) == 6
            await connection.close()

    run(scenario)


@pytest.mark.parametrize("broken", ["ca.key", "node.crt"])
def test_a_file_that_is_no_certificate_or_key_is_a_sentence(certificates: Any, tmp_path: Path, broken: str) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_bytes(os.urandom(200))
    good = tls_of(certificates, "node")
    tls = Tls(str(wrong), good.key) if broken == "node.crt" else Tls(good.cert, str(wrong))
    with pytest.raises(UsageError, match="--tls-cert"):
        tls.server_context()


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_master_that_dies_in_the_middle_of_the_handshake_is_a_wire_error(answers: int) -> None:
    async def die(reader: Any, writer: Any) -> None:
        handshake = ServerHandshake(TOKEN, ("agent",))
        await reader.readexactly(len(PREAMBLE))
        for _ in range(answers):
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            writer.write(frame_of(handshake.receive(await reader.readexactly(length))))
        writer.transport.abort() if answers == 1 else writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(die, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for _ in range(5):
            with pytest.raises(WireError):
                connection = await connect("127.0.0.1", port, token=TOKEN, role="agent", tls=None, timeout_s=5.0)
                try:
                    await connection.receive()
                finally:
                    await connection.close()
        server.close()

    run(scenario)


@pytest.mark.parametrize("sent", [b"", PREAMBLE[:4], PREAMBLE, PREAMBLE + b"\x00\x00"])
def test_a_connection_that_never_proves_itself_is_not_kept(monkeypatch: pytest.MonkeyPatch, sent: Any) -> None:
    async def scenario() -> None:
        async with Echo() as echo:
            proved = await echo.connect()
            monkeypatch.setattr(control, "PROOF_TIMEOUT_S", 0.2)
            async with RawClient.connected(echo.port, sent) as client, asyncio.timeout(10):
                assert b"did not prove itself in time" in (answer := await client.reader.read()) or answer == ANSWER
            assert [why for _, why in echo.strangers] == ["it did not prove itself in time"]
            assert await say(proved, 9) == 9, "a proved connection stays"
            await proved.close()

    run(scenario)


def test_slow_bytes_do_not_extend_the_deadline_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PROOF_TIMEOUT_S", 0.4)

    async def scenario() -> None:
        async with Echo() as echo, RawClient.connected(echo.port, b"") as client:
            for byte in PREAMBLE + frame_of(b"x" * 100):
                client.writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
                if echo.strangers:
                    break
            assert [why for _, why in echo.strangers] == ["it did not prove itself in time"]

    run(scenario)


def test_one_address_may_have_so_many_unproved_connections_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "UNPROVED_PER_ADDRESS_MAX", 3)
    monkeypatch.setattr(control, "CROWDED_S", 600.0)

    async def scenario() -> None:
        async with Echo() as echo:
            idle = [await asyncio.open_connection("127.0.0.1", echo.port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            assert "3 connections of its address" in echo.strangers[0][1]
            for _, one in [*idle, (reader, writer)]:
                one.close()
            async with asyncio.timeout(10):
                while echo.server._newcomers:
                    await asyncio.sleep(0.01)
            good = await echo.connect()
            assert await say(good, 2) == 2
            await good.close()

    run(scenario)


def test_an_address_full_of_unproved_connections_makes_room_for_those_who_prove_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "UNPROVED_PER_ADDRESS_MAX", 3)
    monkeypatch.setattr(control, "CROWDED_S", 0.0)

    async def scenario() -> None:
        async with Echo() as echo:
            idle = [await asyncio.open_connection("127.0.0.1", echo.port) for _ in range(10)]
            good = await echo.connect()
            assert await say(good, 2) == 2
            await good.close()
            assert {why for _, why in echo.strangers} == {"it had not proved itself when others needed the place"}
            for _, writer in idle:
                writer.close()

    run(scenario)


def test_a_busy_server_does_not_count_its_own_slowness_as_an_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stands still for much longer than a connection has to prove itself, again and again."""
    monkeypatch.setattr(control, "UNPROVED_PER_ADDRESS_MAX", 2)
    monkeypatch.setattr(control, "CROWDED_S", 0.5)

    async def scenario() -> None:
        async with Echo() as echo:
            slow = FrameStream(1_000_000, expects_preamble=False)
            await asyncio.get_running_loop().create_connection(lambda: slow, "127.0.0.1", echo.port)
            handshake = ClientHandshake(TOKEN, "agent", "the master")
            slow.write_raw(PREAMBLE)
            slow.write(handshake.first)
            proof = handshake.receive(await slow.read() or b"")
            for _ in range(2):
                time.sleep(0.7)
                others = [await asyncio.open_connection("127.0.0.1", echo.port) for _ in range(3)]
                await asyncio.sleep(0)
                for _, writer in others:
                    writer.close()
            assert proof is not None
            slow.write(proof)
            handshake.receive(await slow.read() or b"")
            assert handshake.keys is not None
            slow.finish()

    run(scenario)


def test_an_agent_that_gave_way_is_told_to_come_again_and_not_that_it_has_no_business_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four thousand agents at once: one that has not proved itself after a second makes room, and tries again. It ended
    for good, as with a wrong token."""
    monkeypatch.setattr(control, "UNPROVED_PER_ADDRESS_MAX", 1)
    monkeypatch.setattr(control, "CROWDED_S", 0.0)

    async def scenario() -> None:
        async with Echo() as echo:
            slow = FrameStream(1_000_000, expects_preamble=False)
            await asyncio.get_running_loop().create_connection(lambda: slow, "127.0.0.1", echo.port)
            handshake = ClientHandshake(TOKEN, "agent", "the master")
            slow.write_raw(PREAMBLE)
            slow.write(handshake.first)
            handshake.receive(await slow.read() or b"")
            good = await echo.connect()
            with pytest.raises(WireError, match="others needed the place") as refused:
                handshake.receive(await slow.read() or b"")
            assert not isinstance(refused.value, AuthenticationError)
            slow.finish()
            await good.close()

    run(scenario)


def test_a_connection_that_is_reset_while_it_is_turned_away_is_no_error() -> None:
    class Reset(asyncio.Transport):
        is_closed = False

        def is_closing(self) -> Any:
            return False

        def can_write_eof(self) -> Any:
            return True

        def write_eof(self) -> None:
            raise OSError(107, "Transport endpoint is not connected")

        def set_write_buffer_limits(self, high: Any = None, low: Any = None) -> None:
            pass

        def close(self) -> None:
            self.is_closed = True

    async def scenario() -> None:
        stream, transport = FrameStream(1_000, expects_preamble=True), Reset()
        stream.connection_made(transport)
        await stream.leave()
        assert transport.is_closed

    run(scenario)


def test_a_port_full_of_unproved_connections_makes_room_for_those_who_prove_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "UNPROVED_MAX", 16)
    monkeypatch.setattr(control, "CROWDED_S", 0.2)

    async def scenario() -> None:
        async with Echo() as echo:
            proved = await echo.connect()
            idle = [await asyncio.open_connection("127.0.0.1", echo.port) for _ in range(40)]
            good = [await echo.connect() for _ in range(3)]
            for number, connection in enumerate([proved, *good]):
                assert await say(connection, number) == number
                await connection.close()
            assert len(echo.server._newcomers) <= 16
            assert {why for _, why in echo.strangers} == {"it had not proved itself when others needed the place"}
            for _, writer in idle:
                writer.close()

    run(scenario)


def test_a_lack_of_descriptors_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No storm of tracebacks: a line, a pause, and then the connection that waited."""
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")] * 3

    def failing(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    async def scenario() -> None:
        async with Echo() as echo:
            monkeypatch.setattr(socket.socket, "accept", failing)
            connection = await echo.connect()
            assert await say(connection, 1) == 1
            assert {why for _, why in echo.strangers} == {"no connection can be accepted now: Too many open files"}
            await connection.close()

    run(scenario)


def test_a_client_that_reads_nothing_is_disconnected_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "UNSENT_BYTES_MAX", 1_000_000)
    page = Page(last_seq=1, records=("x" * 500_000,))

    class Talkative(Echo):
        async def handle(self, connection: Any) -> None:
            while (message := await connection.receive()) is not None:
                connection.send(page if message.term else Acknowledge(0))

    async def scenario() -> None:
        async with Talkative() as echo:
            deaf, good = await echo.connect(), await echo.connect()
            deaf._stream._transport.pause_reading()
            async with asyncio.timeout(60):
                with pytest.raises(WireError):
                    while True:
                        await deaf.send(Heartbeat(1))
                        await asyncio.sleep(0)
            assert await say(good, 0) == 0
            await deaf.close()
            await good.close()

    run(scenario)


def test_clients_of_torchs_store_are_passed_on_to_the_views_store() -> None:
    asyncio.run(pass_on(clients=3))


async def pass_on(clients: int) -> None:
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    views = [None, *(("127.0.0.1", store.port) for store in stores)]
    strangers: list[str] = []
    view = 0
    server = Server(
        "127.0.0.1",
        0,
        token=TOKEN,
        tls=None,
        stranger=lambda peer, why: strangers.append(why),
        torch_store=lambda: views[view],
    )
    port = await server.start(lambda connection: asyncio.sleep(0))

    def client() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=20))

    before_any_view = asyncio.get_running_loop().run_in_executor(None, client)
    async with asyncio.timeout(20):
        while not strangers:
            await asyncio.sleep(0.02)
    assert "there is no view now" in strangers[0]
    view = 1
    first = [await before_any_view] + [await asyncio.to_thread(client) for _ in range(clients)]
    for number, one in enumerate(first):
        await asyncio.to_thread(one.set, f"key {number}", "x" * 1_000_000)
    keys = [f"key {number}" for number in range(len(first))]
    await asyncio.to_thread(stores[0].wait, keys, datetime.timedelta(seconds=20))  # `set` waits for no answer
    view = 2
    second = await asyncio.to_thread(client)
    assert not await asyncio.to_thread(second.check, ["key 0"]), "a new view has a store of its own"
    assert len(await asyncio.to_thread(first[0].get, "key 0")) == 1_000_000, "the old one's clients stay with it"
    await server.stop(0)
