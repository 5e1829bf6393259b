"""What copies of shards ask of a node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.worker import shard_copies


@pytest.mark.parametrize(("free_bytes", "is_refused"), [(1_000, True), (1 << 40, False)])
def test_copies_that_do_not_fit_are_refused(free_bytes: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shard_copies, "memory_headroom", lambda: SimpleNamespace(free_bytes=free_bytes, where="this test")
    )
    tracked = Tracked(model=nn.Linear(100, 100))
    if is_refused:
        with pytest.raises(ScriptError, match="use --replicas 0"):
            shard_copies.check_memory(tracked, 1, True, False, True)
    else:
        shard_copies.check_memory(tracked, 1, True, False, True)
