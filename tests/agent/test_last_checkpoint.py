"""Which checkpoint a failed job's last words name."""

from pathlib import Path

from holdfast.agent.last_checkpoint import find_last_checkpoint


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    assert find_last_checkpoint(tmp_path) is None
    assert find_last_checkpoint(tmp_path / "missing") is None
    for name in ("step-9", "step-10", "step-11", ".step-12.view3.partial", "step-x", "notes"):
        (tmp_path / name).mkdir()
    for name in ("step-9", "step-10", ".step-12.view3.partial", "step-x"):
        (tmp_path / name / "manifest.json").touch()
    assert find_last_checkpoint(tmp_path) == tmp_path / "step-10"  # step-11 has no manifest
