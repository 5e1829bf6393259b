"""Plain attributes of modules and optimizers: put back, kept with the state, and left alone where each rank has its
own."""

import torch
from torch import nn

from holdfast.state.cached_state import CachedState
from holdfast.state.tracked import FLAGS, Tracked


class Counting(nn.Module):
    """Has a counter, a word that may be missing, and something to fill later."""

    word: str

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(2, 2), nn.Dropout(0.1)
        self.calls, self.address = 0, 2**45
        self.cache: torch.Tensor | None = None


def build() -> tuple[Counting, torch.optim.Optimizer, Tracked]:
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.count = 0  # type: ignore[attr-defined]
    tracked = Tracked(model=model, optimizer=optimizer)
    tracked.flags.begin()
    return model, optimizer, tracked


def change(model: Counting, optimizer: torch.optim.Optimizer) -> None:
    model.calls += 1
    model.dropout.p = 0.3
    model.address += 8
    model.word = "new"
    optimizer.count = 7  # type: ignore[attr-defined]


def test_they_are_put_back_and_what_is_filled_by_then_stays() -> None:
    model, optimizer, tracked = build()
    saved = tracked.volatile()
    change(model, optimizer)
    model.cache = torch.ones(1)
    tracked.restore_volatile(saved)
    assert (model.calls, model.dropout.p, optimizer.count) == (0, 0.1, 0)  # type: ignore[attr-defined]
    assert not hasattr(model, "word") and model.cache is not None and model.address == 2**45 + 8


def test_a_replacement_gets_what_the_loop_has_changed_but_no_addresses() -> None:
    model, optimizer, tracked = build()
    assert FLAGS not in tracked.tree()
    change(model, optimizer)
    changed = tracked.tree()[FLAGS]["attributes"]
    assert changed == {"model": {"calls": 1, "word": "new"}, "model.dropout": {"p": 0.3}, "optimizer": {"count": 7}}
    assert CachedState(tracked).state().skeleton == tracked.state().skeleton
    other, its_optimizer, newcomer = build()
    newcomer.load(tracked.state())
    assert (other.calls, other.dropout.p, other.word) == (1, 0.3, "new")
    assert its_optimizer.count == 7 and other.address == 2**45  # type: ignore[attr-defined]


def test_what_each_rank_has_for_itself_is_not_given_to_another() -> None:
    model, optimizer, tracked = build()
    change(model, optimizer)
    tracked.flags.attributes.of_each_rank.add("model.calls")
    other, _, newcomer = build()
    other.calls = 5
    newcomer.load(tracked.state())
    assert other.calls == 5 and other.dropout.p == 0.3
    assert newcomer.flags.attributes.of_each_rank == {"model.calls"}


def test_objects_of_one_rank_are_put_back_and_not_handed_over() -> None:
    own = Counting()
    tracked = Tracked()
    tracked.add("own", own, is_local=True)
    tracked.flags.begin()
    saved = tracked.volatile()
    own.calls = 3
    assert not tracked.flags.changed()
    tracked.restore_volatile(saved)
    assert own.calls == 0
