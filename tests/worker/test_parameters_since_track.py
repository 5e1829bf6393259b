"""What a script changes between job.track and its first step: warned of, or refused where a state was restored."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.worker.parameters_since_track import ParametersSinceTrack


def begun() -> tuple[torch.nn.Linear, Tracked, ParametersSinceTrack]:
    model = torch.nn.Linear(2, 2)
    tracked, since = Tracked(model=model), ParametersSinceTrack()
    since.begin(tracked)
    return model, tracked, since


def test_at_a_first_start_it_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("holdfast.worker.parameters_since_track.warn_once", lambda about, text: said.append(text))
    _, tracked, since = begun()
    since.check(tracked)
    assert not said
    model, tracked, since = begun()
    model.load_state_dict(torch.nn.Linear(2, 2).state_dict())
    since.check(tracked)
    assert ["the model's parameters are changed after job.track" in text for text in said] == [True]


def test_other_bits_than_those_that_were_restored_are_refused() -> None:
    model, tracked, since = begun()
    since.restored(tracked, 7)
    torch.nn.init.ones_(model.weight)
    with pytest.raises(ScriptError, match=r"had restored them from step 7: .* Load or initialise the model before"):
        since.check(tracked)


def test_the_same_bits_written_again_are_not() -> None:
    """As a broadcast of rank 0's parameters writes them."""
    model, tracked, since = begun()
    since.restored(tracked, 7)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    since.check(tracked)
