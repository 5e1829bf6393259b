"""Bulk lines over real sockets: what arrives is what was sent, and nobody gets in."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.image_info import BLOCK_BYTES
from holdfast.errors import AuthenticationError, ReplicaError, WireError
from holdfast.snapshots import transfer as agent_bulk
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.util.blocks import block_count, span
from holdfast.wire import bulk_connection
from holdfast.wire.auth import PROTOCOL_VERSION, Challenge, Opening, Proof, Refusal
from holdfast.wire.bulk_messages import ReadBlocks
from holdfast.wire.frames import ANSWER, LENGTH, PREAMBLE, encode, frame_of
from holdfast.wire.tls import Tls
from support.bulks import TOKEN, Proxy, bulk_client, bulk_server, label, noise
from support.nest import eventually
from support.processes import environment
from support.slot_records import checksums_of

SIZES = (1, 4_096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 17)


def content_of(replicas: ReplicaStore, step: int = 1, local_rank: int = 0) -> bytes:
    with replicas.reading("a", local_rank, 1, step) as found:
        return bytes(found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("knows_checksums", [True, False])
def test_an_image_arrives_as_it_was_sent(tmp_path: Path, size: int, knows_checksums: bool) -> None:
    image = noise(size)
    with bulk_server(tmp_path) as (server, replicas), bulk_client(server.port) as client:
        sent = label(1, image) if knows_checksums else label(1, size_bytes=size)
        client.put(sent, memoryview(image))
        assert content_of(replicas) == image
        assert [held.info.checksums for held in replicas.images()] == [checksums_of(image)]
        assert client.resent_blocks == 0 and block_count(size) == -(-size // BLOCK_BYTES)


def test_many_images_go_over_one_connection_and_the_two_newest_stay(tmp_path: Path) -> None:
    images = {step: noise(100 + step) for step in range(1, 6)}
    with bulk_server(tmp_path) as (server, replicas), bulk_client(server.port) as client:
        for step, image in images.items():
            client.put(label(step, image), memoryview(image))
            client.put(label(step, image), memoryview(image))  # it is there already: nothing is sent
        assert sorted(held.info.step for held in replicas.images()) == [4, 5]
        assert content_of(replicas, 4) == images[4] and content_of(replicas, 5) == images[5]
        with server._lock:
            assert len(server._connections) == 1
        with pytest.raises(ReplicaError, match="older than what is here"):
            client.put(label(3, images[3]), memoryview(images[3]))


def test_an_image_is_read_back_block_by_block(tmp_path: Path) -> None:
    image = noise(2 * BLOCK_BYTES + 5)
    with bulk_server(tmp_path) as (server, _), bulk_client(server.port) as client:
        client.put(label(7, image), memoryview(image))
        assert [(kept.kind, kept.image.step) for kept in client.inventory()] == [("replica", 7)]
        found = bytearray(len(image))
        for index in range(3):
            wanted = ReadBlocks(kind="replica", node_id="a", local_rank=0, view=1, step=7, index=index)
            client.read(wanted, memoryview(found)[span(index, len(image))])
        assert found == image
        for wrong in (ReadBlocks(kind="replica", node_id="a", local_rank=0, view=1, step=8, index=0),
                      ReadBlocks(kind="replica", node_id="a", local_rank=0, view=1, step=7, index=3)):  # fmt: skip
            with pytest.raises(ReplicaError, match=r"has no image|has no block"):
                client.read(wrong, memoryview(bytearray(1)))


@pytest.mark.parametrize("offset", [3 * BLOCK_BYTES // 2, 5 * BLOCK_BYTES // 2, 7 * BLOCK_BYTES // 2])
def test_a_flipped_bit_in_a_block_is_noticed_and_the_block_sent_again(tmp_path: Path, offset: int) -> None:
    image = noise(4 * BLOCK_BYTES)
    with (
        bulk_server(tmp_path) as (server, replicas),
        Proxy(server.port, flips=(offset,)) as proxy,
        bulk_client(proxy.port) as client,
    ):
        client.put(label(1, size_bytes=len(image)), memoryview(image))
        assert client.resent_blocks == 1 and content_of(replicas) == image


@given(offset=st.integers(0, 600))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_anywhere_leaves_nothing_wrong_behind(tmp_path: Path, offset: int) -> None:
    """In the magic, the proof, a header, its length or its seal: the line is given up, and a second one does it."""
    image = noise(100)
    root = tmp_path / str(offset)
    with (
        bulk_server(root) as (server, replicas),
        Proxy(server.port, flips=(offset,)) as proxy,
        bulk_client(proxy.port) as client,
    ):
        short = pytest.MonkeyPatch()
        short.setattr(bulk_connection, "STALL_S", 0.2)
        short.setattr(bulk_connection, "HANDSHAKE_S", 0.2)
        with short.context():
            try:
                client.put(label(1, image), memoryview(image))
            except (WireError, OSError, ReplicaError):
                client.put(label(1, image), memoryview(image))
        short.undo()
        assert content_of(replicas) == image


def test_an_image_that_is_not_what_its_checksums_say_is_not_kept(tmp_path: Path) -> None:
    image = bytearray(noise(3 * BLOCK_BYTES))
    wrong = label(2, bytes(image))
    image[BLOCK_BYTES + 9] ^= 4
    with bulk_server(tmp_path) as (server, replicas), bulk_client(server.port) as client:
        client.put(label(1, b"good"), memoryview(b"good"))
        with pytest.raises(ReplicaError, match="block 1 does not match its checksum"):
            client.put(wrong, memoryview(image))
        assert client.resent_blocks == agent_bulk.RESENDS_MAX
        assert [held.info.step for held in replicas.images()] == [1] and content_of(replicas) == b"good"


def test_a_line_that_breaks_while_idle_is_made_again(tmp_path: Path) -> None:
    with bulk_server(tmp_path) as (server, replicas), bulk_client(server.port) as client:
        client.put(label(1, b"one"), memoryview(b"one"))
        with server._lock:
            for line in server._connections.values():
                agent_bulk._cut(line)
        client.put(label(2, b"two"), memoryview(b"two"))
        assert content_of(replicas, 2) == b"two"


def test_a_closed_client_sends_nothing_and_a_blocked_one_is_freed(tmp_path: Path) -> None:
    image = noise(8 * BLOCK_BYTES)
    errors: list[BaseException] = []

    def send() -> None:
        try:
            client.put(label(1, size_bytes=len(image)), memoryview(image))
        except (WireError, OSError) as error:
            errors.append(error)

    with (
        bulk_server(tmp_path) as (server, replicas),
        Proxy(server.port, stop_at=2 * BLOCK_BYTES) as proxy,
        bulk_client(proxy.port) as client,
    ):
        thread = threading.Thread(target=send)
        thread.start()
        assert proxy.stopped.wait(20.0)
        client.close()
        thread.join(20.0)
        assert errors and not replicas.images()
        with pytest.raises(WireError, match="closed"):
            client.put(label(1, b"x"), memoryview(b"x"))


# --- strangers


def stranger_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if getattr(r, "holdfast_event", "") == "stranger-refused"]
    return [record.getMessage() for record in found]


def hear_all(connection: socket.socket) -> bytes:
    heard = b""
    while more := connection.recv(4_096):
        heard += more
    return heard


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, b"HFBULK1\n", PREAMBLE[:3] + b"x"])
def test_a_stranger_gets_an_answer_and_a_line_in_the_log(
    tmp_path: Path, words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with bulk_server(tmp_path) as (server, _):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as connection:
            connection.sendall(words)
            heard = b""
            try:
                heard = hear_all(connection)
            except ConnectionResetError:  # its further bytes were not read
                heard = ANSWER
            assert heard == ANSWER
        eventually(lambda: stranger_lines(caplog), "a line in the log")
        with bulk_client(server.port) as client:
            assert client.inventory() == ()


@pytest.mark.parametrize(
    "words",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x05hello", b"\x00\x00\x00\x01\xc0", b"\x00\x00\x10\x01" + b"x" * 4_097],
)
def test_garbage_after_the_preamble_ends_the_connection(
    tmp_path: Path, words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with bulk_server(tmp_path) as (server, _):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as connection:
            connection.sendall(PREAMBLE + words)
            try:
                heard = hear_all(connection)
                assert isinstance(msgspec.msgpack.decode(heard[LENGTH.size :], type=Refusal), Refusal)
            except ConnectionResetError:
                pass
        eventually(lambda: stranger_lines(caplog), "a line in the log")


def test_who_does_not_know_the_token_is_not_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with bulk_server(tmp_path) as (server, replicas):
        with (
            bulk_client(server.port, token="another token, long enough") as client,
            pytest.raises(AuthenticationError, match="does not know the job's token"),
        ):
            client.put(label(1, b"x"), memoryview(b"x"))
        eventually(lambda: stranger_lines(caplog), "a line in the log")
        assert not replicas.images()


def test_a_client_that_only_repeats_what_the_server_sent_is_refused(tmp_path: Path) -> None:
    """The server proves itself last: it sends nothing before that could be sent back as a proof."""
    with bulk_server(tmp_path) as (server, _), socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(5.0)
        opening = Opening(version=PROTOCOL_VERSION, role="peer", nonce=b"n" * 16)
        connection.sendall(PREAMBLE + frame_of(encode(opening)))
        challenge = bulk_connection._read_frame(connection, 1_000)
        nonce = msgspec.msgpack.decode(challenge, type=Challenge).nonce
        connection.sendall(frame_of(encode(Proof(nonce * 2))))
        refusal = msgspec.msgpack.decode(bulk_connection._read_frame(connection, 1_000), type=Refusal)
        assert "does not know the job's token" in refusal.why
        assert connection.recv(100) == b""


def test_the_token_does_not_travel(tmp_path: Path) -> None:
    heard = bytearray()

    class Ear(Proxy):
        def _pass_on(self, source: socket.socket, sink: socket.socket, is_upward: bool) -> None:
            sendall = sink.sendall
            tap = type("Tap", (), {"sendall": lambda _, data: (heard.extend(data), sendall(data)),
                                   "shutdown": lambda _, how: sink.shutdown(how)})()  # fmt: skip
            super()._pass_on(source, tap, is_upward)

    with bulk_server(tmp_path) as (server, _), Ear(server.port) as proxy, bulk_client(proxy.port) as client:
        client.put(label(1, b"content"), memoryview(b"content"))
    assert b"content" in heard and TOKEN.encode() not in heard


def test_slow_bytes_do_not_extend_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_connection, "HANDSHAKE_S", 0.5)
    with bulk_server(tmp_path) as (server, _):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20.0)
        with connection, pytest.raises(OSError):  # it is closed long before the last byte
            for byte in PREAMBLE + frame_of(b"x" * 2_000):
                connection.sendall(bytes([byte]))
                threading.Event().wait(0.02)
        eventually(lambda: not server._connections, "it is gone")


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_connection, "UNPROVED_MAX", 2)
    monkeypatch.setattr(bulk_connection, "CROWDED_S", 60.0)
    with bulk_server(tmp_path) as (server, _), bulk_client(server.port) as proved:
        assert proved.inventory() == ()
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=5.0) for _ in range(2)]
        eventually(lambda: len(server._connections) == 3, "both are let in")
        with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as third:
            assert third.recv(1) == b""
        assert proved.inventory() == (), "a proved connection is not held up by strangers"
        for one in silent:
            one.close()
        eventually(lambda: len(server._connections) == 1, "they are gone")
        with bulk_client(server.port) as another:
            assert another.inventory() == ()


FEW_DESCRIPTORS = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from support.bulks import bulk_server
with bulk_server(Path(sys.argv[1])) as (server, _):
    print(server.port, flush=True)
    sys.stdin.read()
"""


def test_strangers_leave_descriptors_to_peers_however_few_there_are(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process, contextlib.ExitStack() as idle:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(100):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
        threading.Event().wait(bulk_connection.CROWDED_S)
        with bulk_client(port) as peer:
            assert peer.inventory() == ()
        _, said = process.communicate("", timeout=60)
    assert "Too many open files" not in said


@pytest.mark.parametrize("words", [b"", PREAMBLE, b"\x16\x03"], ids=["nothing", "the preamble", "the begin of TLS"])
@pytest.mark.parametrize("limit", ["UNPROVED_MAX", "UNPROVED_PER_ADDRESS_MAX"])
def test_slow_strangers_in_all_places_shut_out_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificates: Path, words: bytes, limit: str
) -> None:
    monkeypatch.setattr(bulk_connection, limit, 3)
    ours = tls(certificates, "node", "ca") if words == b"\x16\x03" else None
    with bulk_server(tmp_path, tls=ours) as (server, _):
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=5.0) for _ in range(3)]
        for one in silent:
            one.sendall(words)
        eventually(lambda: len(server._connections) == 3, "all places are taken")
        threading.Event().wait(bulk_connection.CROWDED_S)
        with bulk_client(server.port, tls=ours) as peer:
            assert peer.inventory() == ()
            eventually(lambda: len(server._connections) == 3, "the thread of the one that gave way has ended")
            assert silent[0].recv(1) == b"", "the oldest gave way"
        for one in silent:
            one.close()


def test_an_image_that_is_larger_than_any_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with bulk_server(tmp_path) as (server, _), bulk_client(server.port) as client:
        with pytest.raises((WireError, OSError)):
            client.put(label(1, size_bytes=2**41), memoryview(b"x"))
        assert not list(tmp_path.iterdir())


# --- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`node` and `other` of one root each."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    directory = tmp_path_factory.mktemp("tls")
    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    for root, leaf in (("ca", "node"), ("other-ca", "other")):
        root_key, leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        for subject, key, authority in ((root, root_key, True), (leaf, leaf_key, False)):
            certificate = (
                x509.CertificateBuilder()
                .subject_name(name(subject)).issuer_name(name(root)).public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
                .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
                .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
                .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key()), False)
                .sign(root_key, hashes.SHA256())
            )  # fmt: skip
            (directory / f"{subject}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
            (directory / f"{subject}.key").write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )
    return directory


def tls(directory: Path, leaf: str, ca: str) -> Tls:
    return Tls(str(directory / f"{leaf}.pem"), str(directory / f"{leaf}.key"), str(directory / f"{ca}.pem"))


def test_with_tls_nothing_can_be_read_on_the_way_and_others_stay_out(tmp_path: Path, certificates: Path) -> None:
    ours, strangers = tls(certificates, "node", "ca"), tls(certificates, "other", "other-ca")
    image = noise(BLOCK_BYTES + 7)
    with bulk_server(tmp_path, tls=ours) as (server, replicas):
        with bulk_client(server.port, tls=ours) as client:
            client.put(label(1, image), memoryview(image))
            assert content_of(replicas) == image
        for wrong in (None, strangers, tls(certificates, "other", "ca")):
            with bulk_client(server.port, tls=wrong) as client, pytest.raises((WireError, OSError)):
                client.put(label(2, image), memoryview(image))
        assert [held.info.step for held in replicas.images()] == [1]
        with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert connection.recv(len(ANSWER)) == ANSWER


def test_a_client_that_waits_for_a_machine_that_is_gone_is_freed() -> None:
    errors: list[BaseException] = []

    def send() -> None:
        try:
            client.put(label(1, b"x"), memoryview(b"x"))
        except (WireError, OSError) as error:
            errors.append(error)

    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        crowd = [socket.socket() for _ in range(4)]  # so many that further ones get no answer
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        with bulk_client(port) as client:
            thread = threading.Thread(target=send)
            thread.start()
            eventually(lambda: client._socket is not None, "it connects")
            client.close()
            thread.join(5.0)
            assert not thread.is_alive() and errors
        for one in crowd:
            one.close()
