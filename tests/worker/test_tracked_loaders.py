"""Whether the number of workers may change, and why not."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.data.data_coordinates import DataCoordinates
from holdfast.errors import ScriptError, UsageError
from holdfast.state.tracked import Tracked
from holdfast.worker.tracked_loaders import Sizing, common_coordinates


class Thing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Shared(Thing):
    """As hf.Loader, as far as it is looked at."""

    def set_assignment(self, rank: int, world_size: int) -> None: ...


@pytest.mark.parametrize(
    ("choice", "is_shared", "has_foreign", "why"),
    [
        (None, True, False, ""),
        (None, False, False, "no hf.Loader or hf.Stream is tracked"),
        (None, True, True, "step.batches is given a list"),
        (None, False, True, "step.batches is given a list"),
        (True, False, True, ""),
        (False, True, False, "the script says hf.init(resizable=False)"),
    ],
)
def test_every_source_must_be_shared_out_or_the_script_says_otherwise(
    choice: bool | None, is_shared: bool, has_foreign: bool, why: str
) -> None:
    tracked, sizing = Tracked(**({"data": Shared()} if is_shared else {})), Sizing(choice)
    if has_foreign:
        assert sizing.saw_source([]) == (choice is None), "news only where it changes something"
        assert not sizing.saw_source(())
    found = sizing.why_fixed(tracked, is_per_rank=False, is_cut=False)
    assert found.startswith(why) and bool(found) == bool(why)


def loader(by_rank: tuple[int, ...] | None) -> hf.Loader:
    made = hf.Loader(range(20), global_batch_size=4, rank=0, world_size=4)
    made.coordinates = None if by_rank is None else DataCoordinates(by_rank)
    return made


def test_all_tracked_loaders_have_the_same_data_coordinates() -> None:
    assert common_coordinates(Tracked(data=Shared())) is None
    assert common_coordinates(Tracked(one=loader(None), other=loader(None))) is None
    found = common_coordinates(Tracked(one=loader((0, 0, 1, 1)), other=loader((0, 0, 1, 1))))
    assert found == DataCoordinates((0, 0, 1, 1))
    for other in (None, (0, 1, 0, 1)):
        with pytest.raises(UsageError, match="the loaders 'one' and 'other' divide their batches along different"):
            common_coordinates(Tracked(one=loader((0, 0, 1, 1)), other=loader(other)))


@pytest.mark.parametrize("choice", [None, True, False])
def test_a_loader_s_mesh_fixes_the_number(choice: bool | None) -> None:
    why = Sizing(choice).why_fixed(Tracked(data=loader((0, 0, 1, 1))), is_per_rank=False, is_cut=False)
    assert why.startswith("a loader's mesh is made for this number of ranks")


@pytest.mark.parametrize("choice", [None, False])
def test_what_each_rank_has_for_itself_fixes_the_number(choice: bool | None) -> None:
    tracked = Tracked(data=Shared())
    assert "accumulated over steps" in Sizing(choice).why_fixed(tracked, is_per_rank=True, is_cut=False)
    tracked.add("meter", Thing(), is_local=True)
    assert "(meter)" in Sizing(choice).why_fixed(tracked, is_per_rank=True, is_cut=False)


def test_a_tracked_loader_that_no_step_draws_from_does_not_share_the_data_out() -> None:
    tracked, sizing = Tracked(data=Shared()), Sizing()
    assert sizing.saw_update() and not sizing.saw_update(), "news once"
    assert "no hf.Loader or hf.Stream" in sizing.why_fixed(tracked, is_per_rank=False, is_cut=False)
    drawn, told = Sizing(), Sizing(True)
    drawn.saw_shared()
    assert not drawn.saw_update() and not told.saw_update()
    assert not drawn.why_fixed(tracked, is_per_rank=False, is_cut=False)


@pytest.mark.parametrize(
    ("choice", "is_shared", "has_foreign", "is_refused"),
    [
        (None, True, False, False),
        (None, False, False, True),
        (None, True, True, True),
        (True, False, True, False),
        (False, True, False, False),
        (False, False, False, True),
    ],
)
def test_a_state_of_another_number_of_ranks_is_refused_where_the_data_cannot_be_divided_again(
    choice: bool | None, is_shared: bool, has_foreign: bool, is_refused: bool
) -> None:
    tracked, sizing = Tracked(**({"data": Shared()} if is_shared else {})), Sizing(choice)
    if has_foreign:
        sizing.saw_source([])
    sizing.check_size(tracked, 2)  # no step was made yet
    sizing.divided_for = 2
    sizing.check_size(tracked, 2)
    if not is_refused:
        sizing.check_size(tracked, 1)
        return
    with pytest.raises(ScriptError, match=r"among 2 ranks, and now there is 1.*: start with 2 ranks"):
        sizing.check_size(tracked, 1)


def test_who_wants_both_is_refused() -> None:
    tracked = Tracked()
    tracked.add("meter", Thing(), is_local=True)
    with pytest.raises(ScriptError, match="leave out one of the two"):
        Sizing(True).why_fixed(tracked, is_per_rank=True, is_cut=False)
