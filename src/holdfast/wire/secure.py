"""Both ends prove that they know the job's token, and every frame after that is sealed.

The token itself never travels. Each side sends a random number; each proves itself with a keyed digest over
both numbers; from the same numbers come two session keys, one a direction:

    client -> server   Opening(version, role, nonce)
    server -> client   Challenge(nonce, proof = H(token, "server", both nonces))
    client -> server   Response(proof = H(token, "client", both nonces))
    afterwards         seal(16 bytes) + payload, seal = H(session key, frame number, payload)

So a stranger cannot speak, a recorded conversation cannot be replayed, and a frame cannot be changed, dropped
or moved within a connection. Contents are not hidden: that is what TLS is for.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

import msgspec

from holdfast.errors import AuthenticationError, WireError

PROTOCOL_VERSION = 1
SEAL_BYTES = 16
NONCE_BYTES = 16
TOKEN_CHARS_MIN = 16

Role = Literal["agent", "watcher"]


class Opening(msgspec.Struct, frozen=True):
    """The client's first frame."""

    version: int
    role: Role
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True):
    """The server's first frame."""

    nonce: bytes
    proof: bytes


class Response(msgspec.Struct, frozen=True):
    """The client's second frame."""

    proof: bytes


class Seal:
    """Seals the frames of one direction, and checks them at the other end."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def close(self, payload: bytes) -> bytes:
        """The frame to send."""
        return self._digest(payload) + payload

    def open(self, frame: bytes) -> bytes:
        """The payload of a received frame; raises if it is not the next one of this conversation."""
        seal, payload = frame[:SEAL_BYTES], frame[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._digest(payload)):
            raise AuthenticationError("a frame's seal is wrong: it was changed on the way, or does not belong here")
        return payload

    def _digest(self, payload: bytes) -> bytes:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hashlib.blake2b(number + payload, key=self._key, digest_size=SEAL_BYTES).digest()


class Keys(msgspec.Struct, frozen=True):
    """What both ends derive from the token and the two nonces."""

    server_proof: bytes
    client_proof: bytes
    to_server: bytes
    to_client: bytes


def derive(token: str, client_nonce: bytes, server_nonce: bytes) -> Keys:
    """The proofs and session keys of one connection."""
    secret = hashlib.sha256(token.encode()).digest()

    def keyed(label: bytes) -> bytes:
        return hashlib.blake2b(label + client_nonce + server_nonce, key=secret, digest_size=32).digest()

    return Keys(keyed(b"server"), keyed(b"client"), keyed(b"to-server"), keyed(b"to-client"))


def new_nonce() -> bytes:
    """Fresh for every connection."""
    return secrets.token_bytes(NONCE_BYTES)


def check_opening(opening: Opening) -> None:
    """Refuse a client of another protocol, before it proves anything."""
    if opening.version != PROTOCOL_VERSION:
        raise WireError(
            f"the other side speaks protocol {opening.version}, this one {PROTOCOL_VERSION}: use the same Holdfast"
            " version on every node"
        )
    if len(opening.nonce) != NONCE_BYTES:
        raise WireError("the opening frame is malformed")


def check_proof(proof: bytes, expected: bytes, who: str) -> None:
    """Refuse a side that does not know the token."""
    if not hmac.compare_digest(proof, expected):
        raise AuthenticationError(
            f"{who} does not know the job's token: give the same HOLDFAST_TOKEN or --token-file on every node"
        )
