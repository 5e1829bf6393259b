"""Parts of sentences that many messages have: numbers with their nouns, and lists that do not grow without a limit."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where needed: `1 node`, `2 nodes`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def explained(fact: str, why: str) -> str:
    """Return a fact with its reason, if there is one: `node b is lost: its connection closed`."""
    return f"{fact}: {why}" if why else fact


def bracketed(text: str) -> str:
    """Return a text in brackets behind a blank; nothing if there is none."""
    return f" ({text})" if text else ""


def listed(texts: Sequence[str], shown_max: int = 3) -> str:
    """Join several texts; those beyond `shown_max` are only counted."""
    more = f"; and {len(texts) - shown_max} more" if len(texts) > shown_max else ""
    return "; ".join(texts[:shown_max]) + more


def duration(seconds: float) -> str:
    """Return a time for people, in the two largest units that matter: `0.4 s`, `34 s`, `2 min 5 s`, `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours = whole // 3600
    return f"{hours} h {whole % 3600 // 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
