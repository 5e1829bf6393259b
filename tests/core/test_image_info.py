"""The order of images, and when the parts of a state are complete."""

from __future__ import annotations

import msgspec

from holdfast.core.durability import ImageReport
from holdfast.core.image_info import STEP_MAX, ImageInfo, StateKey, is_complete, pack_version


def test_a_later_view_counts_more_than_a_later_step() -> None:
    """A job that went back to a checkpoint is in a newer view at an earlier step."""
    before, after = ImageInfo(90, 0, 1, 2, 1), ImageInfo(40, 0, 1, 2, 2)
    assert before.version < after.version
    assert -1 < pack_version(*before.version) < pack_version(*after.version)
    assert pack_version(3, STEP_MAX) < pack_version(4, 0) and pack_version(4, 7) & STEP_MAX == 7


def test_parts_of_two_views_are_of_two_states() -> None:
    first, second = ImageInfo(8, 0, 2, 3, 1), ImageInfo(8, 1, 2, 3, 1)
    assert first.state == second.state == StateKey(8, 1, 2, 3) and first.state.parts == first.parts == 6
    assert msgspec.structs.replace(second, view=2).state != first.state


def test_a_state_is_complete_with_all_its_parts() -> None:
    assert is_complete({0: 2, 1: 2}) and is_complete({0: 1})
    assert not is_complete({}) and not is_complete({1: 2}) and not is_complete({0: 2})


def test_a_report_is_a_row_of_numbers() -> None:
    """Every node sends some each second: names of fields would be most of it."""
    report = ImageReport(7, 1, 1, 2, 3, is_replica=True)
    packed = msgspec.msgpack.encode(report)
    assert len(packed) == 8 and msgspec.msgpack.decode(packed, type=ImageReport) == report
