"""Who does not know the token is turned away, whatever it sends; what is sealed cannot be forged."""

import asyncio
import datetime
import ipaddress
import os
import socket

import grpc
import grpc.aio
import msgspec
import pytest

from holdfast.errors import AuthenticationError, UsageError, WireError
from holdfast.wire import gate
from holdfast.wire.channel import METHOD, Server, Tls, connect
from holdfast.wire.messages import Acknowledge, Heartbeat
from holdfast.wire.secure import Opening, Seal, derive, new_nonce

TOKEN = "a token of more than sixteen characters"


class Echo:
    """A server that answers each heartbeat with its term, and remembers whom it turned away."""

    def __init__(self, tls=None):
        self.strangers = []
        self.connections = 0
        self.server = Server(token=TOKEN, tls=tls, handler=self.handle, stranger=self.on_stranger)

    def on_stranger(self, peer, why):
        self.strangers.append((peer, why))

    async def handle(self, connection):
        self.connections += 1
        while (message := await connection.receive()) is not None:
            await connection.send(Acknowledge(message.term))

    async def __aenter__(self):
        self.port = await self.server.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        await self.server.stop(0)

    async def connect(self, token=TOKEN, tls=None, host="127.0.0.1"):
        return await connect(host, self.port, token=token, role="agent", tls=tls, timeout_s=5.0)


def run(scenario):
    return asyncio.run(scenario())


async def say(connection, term):
    await connection.send(Heartbeat(term))
    return (await connection.receive()).number


def test_both_ends_that_know_the_token_talk():
    async def scenario():
        async with Echo() as echo:
            connection = await echo.connect()
            assert [await say(connection, n) for n in range(5)] == list(range(5))
            await connection.close()
            assert echo.strangers == []

    run(scenario)


def test_a_client_with_another_token_is_refused_and_logged_by_neither_side_trusting_the_other():
    async def scenario():
        async with Echo() as echo:
            with pytest.raises(AuthenticationError, match="does not know the job's token"):
                await echo.connect(token="another token of enough length")
            assert echo.connections == 0

    run(scenario)


def test_a_client_that_skips_the_check_of_the_server_is_refused_too():
    async def scenario():
        async with Echo() as echo, grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}") as channel:
            stream = channel.stream_stream(METHOD)()
            await stream.write(msgspec.msgpack.encode(Opening(version=1, role="agent", nonce=new_nonce())))
            await stream.read()
            await stream.write(msgspec.msgpack.encode({"proof": b"x" * 32}))
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stream.read()
            assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert echo.connections == 0
            assert "does not know the job's token" in echo.strangers[0][1]

    run(scenario)


@pytest.mark.parametrize(
    "opening",
    [
        b"",
        b"\xc1garbage",
        os.urandom(300),
        msgspec.msgpack.encode({"version": 1, "role": "king", "nonce": b"x" * 16}),
        msgspec.msgpack.encode({"version": 99, "role": "agent", "nonce": b"x" * 16}),
        msgspec.msgpack.encode({"version": 1, "role": "agent", "nonce": b"short"}),
    ],
    ids=["empty", "junk", "random", "role", "version", "nonce"],
)
def test_a_malformed_opening_gets_an_error_and_a_line(opening):
    async def scenario():
        async with Echo() as echo, grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}") as channel:
            stream = channel.stream_stream(METHOD)()
            await stream.write(opening)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stream.read()
            assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert len(echo.strangers) == 1 and echo.connections == 0
            good = await echo.connect()
            assert await say(good, 7) == 7
            await good.close()

    run(scenario)


def test_a_call_of_another_method_gets_an_error_and_a_line():
    async def scenario():
        async with Echo() as echo, grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await channel.unary_unary("/evil.Service/Steal")(b"")
            assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert "/evil.Service/Steal" in echo.strangers[0][1]

    run(scenario)


def test_a_message_after_the_handshake_that_is_not_ours_ends_that_connection_only():
    async def scenario():
        async with Echo() as echo:
            bad, good = await echo.connect(), await echo.connect()
            await bad._stream.write(bad._seal.close(b"\xc1not a message"))
            with pytest.raises(WireError):
                await bad.receive()
            assert await say(good, 3) == 3
            assert "cannot be read" in echo.strangers[0][1]
            await bad.close()
            await good.close()

    run(scenario)


def test_a_replayed_or_changed_frame_is_refused():
    async def scenario():
        async with Echo() as echo:
            connection = await echo.connect()
            frame = connection._seal.close(msgspec.msgpack.encode(Heartbeat(1)))
            await connection._stream.write(frame)
            assert (await connection.receive()).number == 1
            await connection._stream.write(frame)
            with pytest.raises(WireError, match="seal"):
                await connection.receive()
            await connection.close()

    run(scenario)


def test_seals_catch_every_flipped_bit_and_every_reordering():
    keys = derive(TOKEN, b"c" * 16, b"s" * 16)
    frame = Seal(keys.to_server).close(b"hello")
    for bit in range(len(frame) * 8):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AuthenticationError):
            Seal(keys.to_server).open(bytes(changed))
    writer, reader = Seal(keys.to_server), Seal(keys.to_server)
    _, second = writer.close(b"1"), writer.close(b"2")
    with pytest.raises(AuthenticationError):
        reader.open(second)
    with pytest.raises(AuthenticationError):
        Seal(keys.to_client).open(frame)


def test_nobody_there_and_a_server_that_is_none_are_sentences():
    async def scenario():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            with pytest.raises(WireError):
                await connect("127.0.0.1", port, token=TOKEN, role="agent", tls=None, timeout_s=2.0)
            listener.listen()
            with pytest.raises(WireError, match="no answer"):
                await connect("127.0.0.1", port, token=TOKEN, role="agent", tls=None, timeout_s=0.3)

    run(scenario)


def test_a_port_in_use_is_a_sentence():
    async def scenario():
        async with Echo() as echo:
            other = Server(token=TOKEN, tls=None, handler=echo.handle, stranger=echo.on_stranger)
            with pytest.raises(WireError, match="in use"):
                await other.start("127.0.0.1", echo.port)
            await other.stop(0)

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096, b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"\x16\x03\x01"],
)
def test_bytes_that_are_not_our_protocol_get_an_answer_and_a_line(sent):
    async def scenario():
        async with Echo() as echo:
            reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
            peer = "{}:{}".format(*writer.get_extra_info("sockname"))
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"holdfast: ")
            assert len(echo.strangers) == 1 and echo.strangers[0][0] == peer
            good = await echo.connect()
            assert await say(good, 5) == 5
            await good.close()

    run(scenario)


def test_the_log_names_the_address_of_a_client_without_the_token():
    async def scenario():
        async with Echo() as echo, grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}") as channel:
            stream = channel.stream_stream(METHOD)()
            await stream.write(b"\xc1")
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
            assert echo.strangers[0][0].startswith("127.0.0.1:")

    run(scenario)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A CA, and a certificate for 127.0.0.1 by it, and one by a stranger's CA."""
    directory = tmp_path_factory.mktemp("certificates")
    for ca_name, leaf_name in (("ca", "node"), ("other-ca", "other")):
        _make_certificates(directory, ca_name, leaf_name)
    return directory


def _make_certificates(directory, ca_name, leaf_name):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def build(subject, key, issuer, issuer_key, is_ca):
        now = datetime.datetime.now(datetime.UTC)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(address, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        return builder.sign(issuer_key, hashes.SHA256())

    def save(stem, certificate, key):
        pem = serialization.Encoding.PEM
        (directory / f"{stem}.crt").write_bytes(certificate.public_bytes(pem))
        encoded = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (directory / f"{stem}.key").write_bytes(encoded)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    save(ca_name, build(ca_name, ca_key, ca_name, ca_key, True), ca_key)
    save(leaf_name, build(leaf_name, key, ca_name, ca_key, False), key)


def tls_of(directory, leaf, ca=""):
    root = str(directory / f"{ca}.crt") if ca else ""
    return Tls(str(directory / f"{leaf}.crt"), str(directory / f"{leaf}.key"), root)


def test_mutual_tls_lets_in_who_has_a_certificate_of_the_ca_only(certificates):
    ours, stranger = tls_of(certificates, "node", "ca"), tls_of(certificates, "other", "other-ca")

    async def scenario():
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


def test_a_certificate_file_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"cannot read /nowhere\.crt"):
        Tls("/nowhere.crt", "/nowhere.key").read()


def test_a_master_that_dies_in_the_middle_of_the_handshake_is_a_wire_error():
    async def die(_requests, context):
        opening = msgspec.msgpack.decode(await context.read(), type=Opening)
        keys = derive(TOKEN, opening.nonce, b"s" * 16)
        await context.write(msgspec.msgpack.encode({"nonce": b"s" * 16, "proof": keys.server_proof}))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "died")

    async def scenario():
        server = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler(
            "holdfast.Control", {"Connect": grpc.stream_stream_rpc_method_handler(die)}
        )
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        for _ in range(5):
            with pytest.raises(WireError):
                connection = await connect("127.0.0.1", port, token=TOKEN, role="agent", tls=None, timeout_s=5.0)
                await connection.receive()
        await server.stop(0)

    run(scenario)


def test_a_connection_that_never_proves_itself_is_not_kept(monkeypatch):
    monkeypatch.setattr(gate, "PROOF_TIMEOUT_S", 0.2)

    async def scenario():
        async with Echo() as echo:
            proved = await echo.connect()
            reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
            writer.write(gate.HTTP2_PREFACE + bytes(3) + b"\x04" + bytes(5))  # HTTP/2, and then silence
            async with asyncio.timeout(10):
                await reader.read()
            writer.close()
            assert [why for _, why in echo.strangers] == ["it did not prove itself in time"]
            assert await say(proved, 9) == 9, "who has proved itself stays"
            await proved.close()

    run(scenario)
