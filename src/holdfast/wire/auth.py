"""The handshake: both ends prove that they know the job's token; every frame after that is sealed.

The token itself never travels, and the side that connects proves itself first, so that a stranger who only connects
learns nothing that a guess at the token could be tested against:

    client -> server   Opening(version, role, nonce)
    server -> client   Challenge(nonce)
    client -> server   Proof(H(token, "client", transcript))
    server -> client   Proof(H(token, "server", transcript))
    afterwards         seal (16 bytes) + payload, seal = H(session key, frame number, payload)

Instead of a Challenge or a Proof the server may send a Refusal with a sentence. The transcript is a digest of the two
first messages as they were sent, and of the server's certificate where there is TLS. So version and role are proved
too: a proof that was given to another agent's bulk port (role `peer`) is worth nothing at the master, and a machine in
the middle with another certificate proves nothing by passing messages on. The two session keys, one a direction, come
from the same transcript: a stranger cannot send anything, a recorded connection cannot be replayed, and a frame cannot
be changed, dropped or moved within a connection. Contents are not hidden: that is what TLS is for.

`ClientHandshake` and `ServerHandshake` do no I/O: they take payloads and return payloads, for asyncio (control.py) and
for blocking sockets (bulk_messages.py).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

import msgspec

from holdfast.errors import AuthenticationError, WireError
from holdfast.wire.frames import decode, encode

PROTOCOL_VERSION = 3
SEAL_BYTES = 16
NONCE_BYTES = 16
TOKEN_CHARS_MIN = 16
REFUSAL_CHARS_MAX = 500
"""How much of a server's sentence is believed: nothing is proved when it comes."""

Role = Literal["agent", "watcher", "peer"]
"""Agents and watchers connect to the master; a peer is an agent that connects to another agent's bulk port."""


class Opening(msgspec.Struct, frozen=True):
    """The client's first message."""

    version: int
    role: Role
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The server's answer to an opening."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The evidence that one side knows the token."""

    proof: bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The server's last message to a client that it does not accept, in a sentence."""

    why: str
    is_busy: bool = False
    """It is no fault of the client's: it may come again."""


class Seal:
    """Seals the frames of one direction, and checks them at the other end."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def close(self, payload: bytes) -> bytes:
        """Return the frame to send."""
        return self._digest(payload) + payload

    def open(self, frame: bytes) -> bytes:
        """Return the payload of a received frame. AuthenticationError if it is not the next one of this connection."""
        seal, payload = frame[:SEAL_BYTES], frame[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._digest(payload)):
            raise AuthenticationError("a frame's seal is wrong: it was changed on the way, or does not belong here")
        return payload

    def _digest(self, payload: bytes) -> bytes:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hashlib.blake2b(number + payload, key=self._key, digest_size=SEAL_BYTES).digest()


class Keys(msgspec.Struct, frozen=True):
    """The proofs and session keys that both ends derive from the token and the transcript."""

    server_proof: bytes
    client_proof: bytes
    to_server: bytes
    to_client: bytes


def derive(token: str, transcript: bytes) -> Keys:
    """Return the proofs and session keys of one connection."""
    secret = hashlib.sha256(token.encode()).digest()

    def keyed(label: bytes) -> bytes:
        return hashlib.blake2b(label + transcript, key=secret, digest_size=32).digest()

    return Keys(keyed(b"server"), keyed(b"client"), keyed(b"to-server"), keyed(b"to-client"))


def transcript_of(opening: bytes, challenge: bytes, certificate: bytes) -> bytes:
    """Return the digest of what was sent before the proofs. `certificate`: the server's, as DER; empty without TLS."""
    parts = [hashlib.sha256(part).digest() for part in (opening, challenge, certificate)]
    return hashlib.sha256(b"".join(parts)).digest()


def new_nonce() -> bytes:
    """Return a random number, fresh for every connection."""
    return secrets.token_bytes(NONCE_BYTES)


_opening = msgspec.msgpack.Decoder(Opening)
_proof = msgspec.msgpack.Decoder(Proof)
_challenge_or_refusal: msgspec.msgpack.Decoder[Challenge | Refusal] = msgspec.msgpack.Decoder(Challenge | Refusal)
_proof_or_refusal: msgspec.msgpack.Decoder[Proof | Refusal] = msgspec.msgpack.Decoder(Proof | Refusal)


class ClientHandshake:
    """The connecting side: send `first`, then answer what is received until `keys` are there."""

    def __init__(self, token: str, role: Role, server: str, certificate: bytes = b"") -> None:
        self._token, self._server, self._certificate = token, server, certificate
        self.first = encode(Opening(version=PROTOCOL_VERSION, role=role, nonce=new_nonce()))
        self._expected: Keys | None = None
        self.keys: Keys | None = None
        """The session keys, once both sides have proved themselves."""

    def receive(self, payload: bytes) -> bytes | None:
        """Return the answer to a payload of the server's; None after the last. AuthenticationError if it refuses us, or
        does not know the token."""
        if self._expected is None:
            _accept(decode(_challenge_or_refusal, payload))
            self._expected = derive(self._token, transcript_of(self.first, payload, self._certificate))
            return encode(Proof(self._expected.client_proof))
        answer = _accept(decode(_proof_or_refusal, payload))
        assert isinstance(answer, Proof)
        check_proof(answer.proof, self._expected.server_proof, self._server)
        self.keys = self._expected
        return None

    def seals(self) -> tuple[Seal, Seal]:
        """Return the seal of what this side sends, and that of what it receives."""
        assert self.keys is not None, "the handshake is not over"
        return Seal(self.keys.to_server), Seal(self.keys.to_client)


class ServerHandshake:
    """The accepting side: answer what is received until `keys` are there."""

    def __init__(self, token: str, roles: tuple[Role, ...], certificate: bytes = b"") -> None:
        self._token, self._roles, self._certificate = token, roles, certificate
        self._expected: Keys | None = None
        self._role: Role | None = None
        self.keys: Keys | None = None
        """The session keys, once the client has proved itself."""

    @property
    def role(self) -> Role:
        """The role of the client, which is proved with the rest."""
        assert self.keys is not None and self._role is not None, "the handshake is not over"
        return self._role

    def receive(self, payload: bytes) -> bytes:
        """Return the answer to a payload of the client's. WireError with the sentence of a refusal if it is wrong."""
        if self._expected is None:
            opening = decode(_opening, payload)
            check_opening(opening, self._roles)
            challenge = encode(Challenge(new_nonce()))
            self._expected = derive(self._token, transcript_of(payload, challenge, self._certificate))
            self._role = opening.role
            return challenge
        check_proof(decode(_proof, payload).proof, self._expected.client_proof, f"the {self._role}")
        self.keys = self._expected
        return encode(Proof(self.keys.server_proof))

    def seals(self) -> tuple[Seal, Seal]:
        """Return the seal of what this side sends, and that of what it receives."""
        assert self.keys is not None, "the handshake is not over"
        return Seal(self.keys.to_client), Seal(self.keys.to_server)


def check_opening(opening: Opening, roles: tuple[Role, ...]) -> None:
    """Refuse a client of another protocol version or for another port, before it proves anything."""
    if opening.version != PROTOCOL_VERSION:
        raise WireError(
            f"the other side speaks protocol {opening.version}, this one {PROTOCOL_VERSION}: use the same Holdfast"
            " version on every node"
        )
    if opening.role not in roles:
        raise WireError(f"this port is not for a connection with the role {opening.role}")
    if len(opening.nonce) != NONCE_BYTES:
        raise WireError("the opening frame is malformed")


def check_proof(proof: bytes, expected: bytes, who: str) -> None:
    """Refuse a side that does not know the token."""
    if not hmac.compare_digest(proof, expected):
        raise AuthenticationError(
            f"{who} does not know the job's token: give the same HOLDFAST_TOKEN or --token-file on every node"
        )


def _accept(answer: Challenge | Proof | Refusal) -> Challenge | Proof:
    if isinstance(answer, Refusal):
        kind = WireError if answer.is_busy else AuthenticationError
        raise kind(answer.why[:REFUSAL_CHARS_MAX] or "the other side refused us")
    return answer
