"""A process that does what an agent does for snapshots: owns the memory, brings what is wanted to storage."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

from holdfast.agent.persister import Persister
from holdfast.agent.vault import Vault
from holdfast.wire.session import Sealed

MESSAGE = struct.Struct("=3q")
"""Seat, step, whether it is to become a checkpoint."""
JOB, NODE = "campaign", "node-0"


def persist(root: Path, url: str, ears: int, mouth: int) -> None:
    """For ever. Steps that are published are said at the mouth, as an agent tells its master."""
    asyncio.run(_persist(root, url, ears, mouth))


async def _persist(root: Path, url: str, ears: int, mouth: int) -> None:
    vault = Vault(root, NODE)
    vault.open(JOB)
    assert vault.is_open, "the memory belongs to somebody else"
    persister = Persister(vault, "last:3", lambda step, _: say(mouth, step))
    persister.open(JOB, url)
    os.set_blocking(ears, False)

    def hear() -> None:
        message = os.read(ears, MESSAGE.size)
        if not message:
            asyncio.get_running_loop().remove_reader(ears)
            return
        seat, step, is_wanted = MESSAGE.unpack(message)
        if is_wanted:
            persister.wanted(seat, Sealed(step, True))

    asyncio.get_running_loop().add_reader(ears, hear)
    say(mouth, -1)  # here we are
    await asyncio.Event().wait()


def say(mouth: int, step: int) -> None:
    os.write(mouth, step.to_bytes(8, "little", signed=True))


def heard(mouth: int) -> list[int]:
    """All that was said until the speaker's death."""
    said = b""
    while more := os.read(mouth, 65_536):
        said += more
    return [int.from_bytes(said[at : at + 8], "little", signed=True) for at in range(0, len(said), 8)]
