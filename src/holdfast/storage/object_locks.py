"""Leases: where there are no locks, an object that says who uses a folder and until when.

A lease is renewed by a thread while it is needed, well before it expires. A process that dies leaves it to expire.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from holdfast.errors import CheckpointError
from holdfast.storage.stores import Store
from holdfast.util.logs import get_logger

SUFFIX = ".lease"
DURATION_S = 600.0
"""Clocks of nodes that train together differ by far less; after a kill, nothing is swept for so long."""
RENEWAL_S = DURATION_S / 4
LEASE_BYTES_MAX = 4096

log = get_logger(__name__)


@contextmanager
def lease(store: Store, folder: str, clock: Callable[[], float]) -> Iterator[None]:
    """Hold a lease while this context lasts. Where we may read but not write there is none, and a warning is logged."""
    name = f"{folder}/{secrets.token_hex(8)}{SUFFIX}"
    try:
        _put(store, name, clock())
    except CheckpointError as error:
        log.warning("lease-failed", f"{error}: the folder is used without a lease, so a prune elsewhere may remove it")
        yield
        return
    over = Event()
    renewing = Thread(target=_renew, args=(store, name, clock, over), name="holdfast-lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()
        _end(store, name)


def live_leases(store: Store, folder: str, now: float) -> list[str]:
    """Return who holds a lease directly in a folder, as text for people."""
    found = []
    for name in store.names(folder):
        if name.endswith(SUFFIX) and "/" not in name[len(folder) + 1 :]:
            who = _holder(store, name, now)
            found += [who] if who else []
    return found


def _put(store: Store, name: str, now: float) -> None:
    who = f"process {os.getpid()} on {socket.gethostname()}"
    content = json.dumps({"until_unix_s": now + DURATION_S, "who": who}).encode()
    store.put(name, [memoryview(content)], len(content))


def _renew(store: Store, name: str, clock: Callable[[], float], over: Event) -> None:
    while not over.wait(RENEWAL_S):
        try:
            _put(store, name, clock())
        except CheckpointError as error:
            log.warning("lease-renewal-failed", f"a lease could not be renewed: {error}")


def _end(store: Store, name: str) -> None:
    try:
        store.delete(name)
    except CheckpointError as error:
        log.warning("lease-removal-failed", f"{error}; the lease expires in {DURATION_S:g} s")


def _holder(store: Store, name: str, now: float) -> str:
    try:
        match json.loads(store.read(name, 0, LEASE_BYTES_MAX)):
            case {"until_unix_s": float(until) | int(until), "who": str(who)}:
                return who if until > now else ""
    except (CheckpointError, ValueError, RecursionError):  # gone since, or not ours
        pass
    return ""
