"""The handshake as a state machine, without a connection: who proves what, and what a seal catches."""

from typing import Any

import pytest

from holdfast.errors import AuthenticationError, WireError
from holdfast.wire.auth import (
    PROTOCOL_VERSION,
    ClientHandshake,
    Opening,
    Proof,
    Refusal,
    Seal,
    ServerHandshake,
    derive,
    new_nonce,
    transcript_of,
)
from holdfast.wire.frames import encode

TOKEN = "a token of more than sixteen characters"


def shake_hands(client: Any, server: Any) -> None:
    """Pass payloads on until both are done."""
    payload = client.first
    while payload is not None:
        answer = server.receive(payload)
        payload = client.receive(answer)


def test_both_sides_end_with_the_same_keys() -> None:
    client, server = ClientHandshake(TOKEN, "watcher", "the master"), ServerHandshake(TOKEN, ("agent", "watcher"))
    shake_hands(client, server)
    assert client.keys == server.keys and server.role == "watcher"
    (seal, opener), (other_seal, other_opener) = client.seals(), server.seals()
    assert other_opener.open(seal.close(b"up")) == b"up" and opener.open(other_seal.close(b"down")) == b"down"


def test_the_client_proves_itself_before_the_server_does() -> None:
    server = ServerHandshake(TOKEN, ("agent",))
    server.receive(encode(Opening(version=PROTOCOL_VERSION, role="agent", nonce=new_nonce())))
    with pytest.raises(AuthenticationError, match="does not know the job's token"):
        server.receive(encode(Proof(b"x" * 32)))
    assert server.keys is None


def test_a_server_that_does_not_know_the_token_is_refused() -> None:
    client = ClientHandshake(TOKEN, "agent", "the master")
    impostor = ServerHandshake("another token of enough length", ("agent",))
    client.receive(impostor.receive(client.first))
    with pytest.raises(AuthenticationError, match="the master does not know"):
        client.receive(encode(Proof(b"x" * 32)))


def test_the_servers_proof_is_not_the_clients() -> None:
    """Sent back to a server, what another server said proves nothing."""
    keys = derive(TOKEN, b"transcript")
    assert len({keys.client_proof, keys.server_proof, keys.to_client, keys.to_server}) == 4


def test_a_refusal_is_an_authentication_error_with_its_sentence_cut() -> None:
    for refusal in (Refusal("because"), Refusal("y" * 10_000)):
        with pytest.raises(AuthenticationError, match=r"because|y") as error:
            ClientHandshake(TOKEN, "agent", "the master").receive(encode(refusal))
        assert len(str(error.value)) <= 500


def test_a_proof_for_another_port_is_worth_nothing() -> None:
    client = ClientHandshake(TOKEN, "peer", "the other agent")
    with pytest.raises(WireError, match="role peer"):
        ServerHandshake(TOKEN, ("agent", "watcher")).receive(client.first)


def test_the_proof_is_bound_to_the_certificate_and_to_both_first_messages() -> None:
    parts = (b"opening", b"challenge", b"certificate")
    found = {transcript_of(*parts)}
    for index in range(3):
        found.add(transcript_of(*(b"" if i == index else part for i, part in enumerate(parts))))
    assert len(found) == 4
    client = ClientHandshake(TOKEN, "peer", "the other agent", b"one certificate")
    with pytest.raises(AuthenticationError):
        shake_hands(client, ServerHandshake(TOKEN, ("peer",), b"another"))


def test_seals_catch_every_flipped_bit_and_every_reordering() -> None:
    keys = derive(TOKEN, b"transcript")
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
