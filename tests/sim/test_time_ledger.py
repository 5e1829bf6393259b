"""Every second of every machine is in exactly one account."""

from __future__ import annotations

import pytest

from holdfast.sim.time_ledger import (
    AWAY,
    BANNED,
    CHECKPOINTS,
    IDLE,
    IN_REPAIR,
    REDONE,
    SINCE_CHECKPOINT,
    TRAINING,
    WAITING,
    TimeLedger,
)


def test_the_accounts_add_up() -> None:
    ledger = TimeLedger(nodes=10, span_s=1_000.0, checkpoint_every_s=50.0, checkpoint_stall_s=5.0)
    ledger.go(8.0, 100.0)
    ledger.advance(300.0)
    ledger.in_repair, ledger.banned = 1, 1
    ledger.stop("stalled: detection", 420.0, redone_s=10.0)
    ledger.away = 1
    ledger.lose_unsaved()
    ledger.go(7.0, 500.0)
    ledger.advance(1_000.0)
    accounts = ledger.accounts
    assert sum(accounts.values()) == pytest.approx(10_000.0)
    assert accounts[WAITING] == 10 * 100.0
    assert accounts[CHECKPOINTS] == pytest.approx(0.1 * (8 * 320.0 + 7 * 500.0))
    assert accounts[REDONE] == pytest.approx(0.9 * 8 * 10.0)
    assert accounts[SINCE_CHECKPOINT] == pytest.approx(0.9 * 8 * (20.0 - 10.0)), "of 320 s, 20 s after the sixth"
    assert accounts[IN_REPAIR] == 700.0 and accounts[AWAY] == 580.0
    assert accounts[BANNED] == pytest.approx(120.0 + 0.0 + 500.0 + 80.0, abs=700.0)
    assert accounts[IDLE] >= 0.0 and accounts["stalled: detection"] > 0.0
    assert sum(ledger.training_course) / len(ledger.training_course) == pytest.approx(
        (accounts[TRAINING] + accounts[REDONE] + accounts[SINCE_CHECKPOINT]) / 10_000.0
    )
