"""What the protection of a state takes of the host's memory, and what is chosen when nobody says anything."""

from __future__ import annotations

import pytest

from holdfast.core.memory_plan import copies_by_default, host_memory, pinned_bytes, shortage

GIB = 2**30
MODEL_8B = 12_050_000_000
"""The shard of one of eight ranks: 12 bytes a parameter."""


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    assert pinned_bytes(MODEL_8B) == 16 * GIB


def test_a_model_of_8b_on_one_node() -> None:
    with_copies = host_memory(MODEL_8B, MODEL_8B, copies=1, is_on_device=True)
    assert with_copies.ring_bytes == 32 * GIB + 2 * MODEL_8B
    assert with_copies.slots_bytes == 2 * MODEL_8B and with_copies.staging_bytes == 16 * GIB
    assert 700 < 8 * with_copies.total_bytes / GIB < 750
    without = host_memory(MODEL_8B, MODEL_8B, copies=0, is_on_device=True)
    assert 300 < 8 * without.total_bytes / GIB < 310


def test_on_the_cpu_nothing_is_pinned() -> None:
    memory = host_memory(1000, 1000, copies=1, is_on_device=False)
    assert (memory.ring_bytes, memory.slots_bytes, memory.staging_bytes) == (4000, 2000, 0)
    assert host_memory(1000, 1000, copies=0, is_on_device=False, has_snapshots=False).total_bytes == 0


def test_what_does_not_fit_is_said_with_all_numbers() -> None:
    memory = host_memory(MODEL_8B, MODEL_8B, copies=1, is_on_device=True)
    assert shortage(memory, 8, 800 * GIB, "on this machine") == ""
    why = shortage(memory, 8, 500 * GIB, "on this machine")
    assert "500.0 GiB are free on this machine" in why and "435.6 GiB for copies of shards" in why


@pytest.mark.parametrize(
    ("is_default", "is_on_device", "has_snapshots", "is_elastic", "copies"),
    [
        (True, True, True, False, 0),
        (True, False, True, False, 1),  # on the CPU as ever
        (False, True, True, False, 1),  # it was asked for
        (True, True, False, False, 1),  # nothing else protects the state
        (True, True, True, True, 1),  # it is cut again from the copies
    ],
)
def test_copies_before_each_commit_are_for_those_who_can_pay_them(
    is_default: bool, is_on_device: bool, has_snapshots: bool, is_elastic: bool, copies: int
) -> None:
    chosen = copies_by_default(
        1, is_default=is_default, is_on_device=is_on_device, has_snapshots=has_snapshots, is_elastic=is_elastic
    )
    assert chosen == copies
