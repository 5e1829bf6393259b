"""What many ranks have to say, said once. Pure."""

from __future__ import annotations

from collections.abc import Iterable

RANKS_SHOWN_MAX = 16


def group_stacks(stacks: Iterable[tuple[int, str]]) -> list[tuple[tuple[int, ...], str]]:
    """Group ranks with the same stack; the smallest group first, as it is the unusual one."""
    groups: dict[str, set[int]] = {}
    for rank, stack in stacks:
        groups.setdefault(stack, set()).add(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), sorted(group[1])))
    return [(tuple(sorted(ranks)), stack) for stack, ranks in ordered]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: `rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(set(ranks))
    stretches: list[list[int]] = []
    for rank in ordered:
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    shown = [f"{low}" if low == high else f"{low}-{high}" for low, high in stretches[:RANKS_SHOWN_MAX]]
    more = f" and {len(stretches) - RANKS_SHOWN_MAX} more" if len(stretches) > RANKS_SHOWN_MAX else ""
    return f"rank{'s' * (len(ordered) != 1)} {', '.join(shown)}{more}"
