"""The complete scripts of docs/layouts.md: they run as they stand, and a killed rank changes no bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from holdfast.core.records import IncidentClosed, StepCommittedRecord, WorkersStartedRecord
from holdfast.core.strategies import Strategy
from support.jobs import Place, wait_for

PAGE = Path(__file__).resolve().parents[2] / "docs/layouts.md"
SCRIPTS = {
    name: text for text, name in re.findall(r"^```python\n(# (\w+)\.py: .*?)^```", PAGE.read_text(), re.M | re.S)
}


def final_loss(place: Place) -> list[str]:
    """What the script has printed at its end."""
    texts = [path.read_text() for path in place.state_dir.rglob("stdout.log")]
    return re.findall(r"^final loss (\S+)", "\n".join(texts), re.MULTILINE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_page_ends_with_the_same_loss_when_a_rank_is_killed(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(SCRIPTS[name])
    calm, hurt = Place(tmp_path / "calm"), Place(tmp_path / "hurt")
    assert calm.start("--nproc-per-node", "4", str(script)).wait() == 0
    agent = hurt.start("--nproc-per-node", "4", str(script))
    wait_for(lambda: hurt.journal.of(StepCommittedRecord), what="the first step")
    victim = hurt.journal.of(WorkersStartedRecord)[0].pids[1]
    os.kill(victim, signal.SIGKILL)
    assert agent.wait() == 0, agent.stderr[-4000:]
    assert [one.strategy for one in hurt.journal.of(IncidentClosed)] == [Strategy.RECOVER_IN_PLACE]
    (loss,) = final_loss(calm)
    assert final_loss(hurt) == [loss]


def test_the_page_has_both_scripts() -> None:
    assert set(SCRIPTS) == {"train_fsdp2_tp", "train_pipeline"}
