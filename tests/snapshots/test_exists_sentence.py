"""What is said of a checkpoint that was there already."""

from __future__ import annotations

from holdfast.snapshots.uploader import exists_sentence


def test_the_other_run_is_named_where_it_has_a_name() -> None:
    assert exists_sentence("/c/step-5", "night") == (
        "/c/step-5 was there already, of job night: that one stays, and this run's is discarded"
    )
    assert exists_sentence("/c/step-5", "") == (
        "/c/step-5 was there already, of another run: that one stays, and this run's is discarded"
    )
