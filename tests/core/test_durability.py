"""Which steps are whole in the nodes' memory, and what they are safe against."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.durability import Durability, ImageReport, durability, newest_complete_step


def images(
    *steps: int, part: int = 0, shards: int = 1, shares: int = 2, view: int = 1, replica: bool = False, pieces: int = 1
) -> Any:
    return tuple(ImageReport(step, part, shards, shares, view, replica, pieces) for step in steps)


def piece(*steps: int, part: int, of: int = 2) -> Any:
    """What one of a parity group says of an image that another has made."""
    return images(*steps, part=part, shares=3, replica=True, pieces=of)


CASES = {
    "nothing": ([], -1),
    "all parts of both steps": ([*images(8, 9), *images(8, 9, part=1)], 9),
    "of the newer one a part is torn": ([*images(8, 9), *images(8, part=1)], 8),
    "a part is missing": ([*images(8, 9)], -1),
    "said at different moments": ([*images(40, 41), *images(37, 38, part=1)], 38),
    "parts of two views are not one state": ([*images(9), *images(9, part=1, view=2)], -1),
    "the old view's is whole, the new one's not yet": (
        [*images(8, 9), *images(8, 9, part=1), *images(12, view=2, shares=3)],
        9,
    ),
    "both views' are": ([*images(9), *images(9, part=1), *images(12, view=2, shares=1)], 12),
    "shards and shares": ([i for p in range(4) for i in images(5, part=p, shards=2)], 5),
    "shards and shares, one missing": ([i for p in range(3) for i in images(5, part=p, shards=2)], -1),
    "a replica of the same step": ([*images(40, 41), *images(40, part=1, replica=True)], 40),
    "a replica that was told of earlier": ([*images(40, 41), *images(30, part=1, replica=True)], 30),
    "parity of it on all others": (
        [*images(8, 9, shares=3), *images(8, 9, part=1, shares=3), *piece(8, part=2), *piece(8, 9, part=2)],
        8,
    ),
    "parity on one of two": ([*images(8, 9, shares=3), *images(8, 9, part=1, shares=3), *piece(8, part=2)], -1),
    "a replica beside its original": ([*images(9), *images(9, part=1), *images(8, part=1, replica=True)], 9),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_is_whole(case: str) -> None:
    held, step = CASES[case]
    assert newest_complete_step(held) == step
    assert newest_complete_step(reversed(held)) == step


def test_what_survives_what() -> None:
    own = {"a": images(8, 9), "b": images(8, 9, part=1)}
    assert durability(own, -1) == Durability(9, -1, -1)
    assert durability({}, 5) == Durability(-1, -1, 5)
    copied = {
        "a": (*images(8, 9), *images(8, part=1, replica=True)),
        "b": (*images(8, 9, part=1), *images(8, replica=True)),
    }
    assert durability(copied, 5) == Durability(9, 8, 5)
    one_way = {"a": (*images(8), *images(8, part=1, replica=True)), "b": images(8, part=1)}
    assert durability(one_way, -1) == Durability(8, -1, -1), "part 0 is lost with node a"
    own = {name: images(8, 9, part=part, shares=3) for part, name in enumerate("abc")}
    others = {"a": (1, 2), "b": (0, 2), "c": (0, 1)}
    parity = {n: (*own[n], *(p for part in others[n] for p in piece(8, part=part))) for n in "abc"}
    assert durability(parity, -1) == Durability(9, 8, -1)
    assert durability({**parity, "c": own["c"]}, -1) == Durability(9, -1, -1), (
        "c's piece of what a and b have is missing"
    )
    twice_on_one_node = {"a": (*images(8), *images(8, part=1), *images(8, part=1, view=1))}
    assert durability(twice_on_one_node, -1) == Durability(8, -1, -1)
