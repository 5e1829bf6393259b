"""Connections that have not proved the job's token: how many there may be, and what the log says of them.

Control and bulk ports use the same two classes. A stranger's text reaches a log line or an answer through `printable`
only; its address has one line a minute, with a count of what was left out, and all addresses together have a cap.
"""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from holdfast.util.logs import get_logger

TEXT_CHARS_MAX = 200
LINE_S = 60.0
"""Time between two lines about one address."""
LINES_MAX = 100
"""Lines about all addresses together in that time, and the number of addresses that are remembered."""
UNPROVED_MIN = 16
"""How many connections may be unproved at once, however few descriptors there are."""

log = get_logger(__name__)


def printable(text: str) -> str:
    """Return a text that a stranger may have chosen as it may be logged or sent: cut, on one line."""
    cut = text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 3]}..."
    return "".join(character if character.isprintable() else "?" for character in cut)


class _Silenced(msgspec.Struct):
    """One address, or all that are too many to be remembered: since when its lines are left out, and how many were."""

    since: float
    count: int = 0


class StrangerLog:
    """The log lines about connections that were turned away from one port. May be used from several threads."""

    def __init__(self, port: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._port, self._clock = port, clock
        self._lock = threading.Lock()
        self._silenced: dict[str, _Silenced] = {}

    def turned_away(self, peer: str, why: str) -> None:
        """Log that a peer (`address:port`) was turned away, or count it if its address had a line a moment ago."""
        address = peer.rpartition(":")[0] or peer
        with self._lock:
            now = self._clock()
            self._end_periods(now - LINE_S)
            if len(self._silenced) >= LINES_MAX and address not in self._silenced:
                address = "other addresses"
            if address in self._silenced:
                self._silenced[address].count += 1
                return
            self._silenced[address] = _Silenced(now)
        log.warning("stranger-refused", f"turned {peer} away: {printable(why)}", port=self._port)

    def close(self) -> None:
        """Log the counts that are left."""
        with self._lock:
            self._end_periods(float("inf"))

    def _end_periods(self, began_before: float) -> None:
        for address, silenced in list(self._silenced.items()):
            if silenced.since > began_before:
                break  # the others began later
            del self._silenced[address]
            if silenced.count:
                text = f"turned {silenced.count} more connection{'s' * (silenced.count > 1)} from {address} away"
                log.warning("strangers-refused", text, port=self._port, count=silenced.count)


def unproved_max(wanted: int) -> int:
    """Return how many descriptors strangers may have at a port: a quarter of this process's at most, the rest is for
    those who have proved themselves."""
    return min(wanted, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, UNPROVED_MIN))


class UnprovedConnections:
    """The number of connections that have not proved themselves yet, in all and by address."""

    def __init__(self, total_max: int, address_max: int) -> None:
        self._total_max, self._address_max = total_max, address_max
        self._by_address: Counter[str] = Counter()
        self._total = 0
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether there is room for no other, whatever its address."""
        return self._total >= self._total_max

    def enter(self, address: str) -> bool:
        """Count a connection; False, and nothing is counted, if there is no room for it."""
        with self._lock:
            if self.is_full or self._by_address[address] >= self._address_max:
                return False
            self._by_address[address] += 1
            self._total += 1
            return True

    def leave(self, address: str) -> None:
        """Stop counting a connection: it has proved itself, or is gone."""
        with self._lock:
            self._total -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
