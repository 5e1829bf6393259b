"""Which micro-batches of a broken step are run again, and that all is as if none had been left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.data.batch_source import BatchSource
from holdfast.errors import RetryableError, ScriptError, ViewOverError
from holdfast.state.tracked import Tracked
from holdfast.worker.collectives import groups
from holdfast.worker.micro_batches import GradientCopy, MicroBatches
from holdfast.worker.step import Step

COUNT = 6
"""Micro-batches a step."""


class Data(BatchSource):
    """Six batches, or another rank's."""

    def __init__(self) -> None:
        super().__init__(12, has_slots=True)
        self._assignment = (0, 2)
        self._place = 0

    def step_batches(self) -> Iterator[torch.Tensor]:
        slots = list(self._slots())
        for self._place, slot in enumerate(slots):
            self._last_batch = self._last_batch._replace(slot=slot, is_last=slot == slots[-1])
            yield torch.randn(4, 3, generator=torch.Generator().manual_seed(slot))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.step_batches()

    weights: tuple[float, ...] | None = None


class Meter:
    """Counts the batches."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class End(NamedTuple):
    """What a step has come to."""

    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]
    metered: int
    sums: dict[str, float]
    losses: list[float]
    called: list[int]

    def bits(self) -> list[Any]:
        tensors = [t.detach().contiguous().view(-1).view(torch.uint8).tolist() for t in self.gradients + self.buffers]
        return [tensors, *self[2:]]


class Bench:
    """One rank, without others: an attempt of a step, what breaks it, and what undoes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.meter, self.data = Meter(), Data()
        self.transaction = SimpleNamespace(is_committed=False, has_updated=False, has_changed_parameters=False)
        self.watched: list[torch.Tensor] = []
        self.engine = self._engine()
        self.start = copy.deepcopy(self.model.state_dict())
        self.batches = MicroBatches(self.engine, Tracked(model=self.model, meter=self.meter))
        self.called: list[int] = []
        self.rounds: list[int] = []
        """The slots that were computed, in all attempts."""
        self.is_over = False
        monkeypatch.setattr(groups, "is_revoked", lambda: self.is_over)
        monkeypatch.setattr(groups, "check", self._check)

    def _engine(self) -> Any:
        return SimpleNamespace(
            membership=SimpleNamespace(view=1),
            is_fresh_start=False,
            is_stepping=True,
            transaction=self.transaction,
            guards=SimpleNamespace(losses=lambda: list(self.watched), put_back=self._put_back),
            collectives_begun=0,
        )

    def _put_back(self, losses: list[torch.Tensor]) -> None:
        self.watched = list(losses)

    def _check(self) -> None:
        if self.is_over:
            raise ViewOverError("a rank died")

    def _batches(self, step: Step, data: Any, weight: object) -> Iterator[torch.Tensor]:
        """In place of the job's."""
        loop = self.batches.loop(step, data)
        for batch in data.step_batches():
            if loop.begins():
                yield batch

    def _begin_step(self, step: Step) -> None:
        self.batches.begin_step()

    def attempt(self, happening: Callable[[int], None] = lambda slot: None, number: int = 5) -> End:
        """Make an attempt; `happening` is called in each round, before its backward."""
        step = Step(self, number, 0)  # type: ignore[arg-type]
        step.is_entered = step._is_inside = True
        self._begin_step(step)
        for x in step.batches(self.data, keep=True):
            slot = self.data.slot
            self.run(slot)
            happening(slot)
            loss = self.model(x).square().mean()
            loss.backward()
            step.add(loss=loss)
            step.log(last=slot)
            step.after_commit(partial(self.called.append, slot))
            self.count()
            self.watch(loss)
        assert step.values["last"] == slot
        step._committed()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        losses = [float(loss) for loss in self.watched]
        return End(gradients, list(self.model.buffers()), self.meter.count, step.sums, losses, self.called)

    def run(self, slot: int) -> None:
        self.rounds.append(slot)

    def count(self) -> None:
        self.meter.count += 1

    def watch(self, loss: torch.Tensor) -> None:
        self.watched.append(loss.detach())

    def undo(self, error: BaseException | None = None, *, view: int | None = None) -> None:
        """Undo an attempt, and join the next view."""
        self.engine.membership.view += 1 if view is None else view
        self.is_over = False
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        self.meter.count, self.watched, self.rounds = 0, [], []
        self.called.clear()
        self.batches.end_attempt(error)

    def end_view(self, at: int) -> Callable[[int], None]:
        """Return what happens: in the round of this slot the view ends."""

        def happen(slot: int) -> None:
            self.is_over |= slot == at

        return happen

    def break_in(self, at: int, error: BaseException) -> Callable[[int], None]:
        """Return what happens: the round of this slot raises an error, with its gradients half computed."""

        def happen(slot: int) -> None:
            if slot == at:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(7.0)
                raise error

        return happen


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an undisturbed step comes to."""
    return Bench(monkeypatch).attempt().bits()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, whole: list[Any]) -> Bench:
    """After `whole`, as both put themselves in the place of the groups."""
    return Bench(monkeypatch)


@pytest.mark.parametrize("slot", range(COUNT - 1))
def test_a_view_that_ends_costs_no_finished_round(bench: Bench, whole: list[Any], slot: int) -> None:
    with pytest.raises(ViewOverError):
        bench.attempt(bench.end_view(slot))
    assert bench.rounds == list(range(slot + 1)), "the round under way is finished, and no other is begun"
    bench.undo(ViewOverError("a rank died"))
    assert bench.attempt().bits() == whole
    assert bench.rounds == list(range(slot + 1, COUNT))


def test_a_last_round_that_breaks_is_the_only_one_that_is_run_again(bench: Bench, whole: list[Any]) -> None:
    with pytest.raises(ViewOverError):
        bench.attempt(bench.break_in(COUNT - 1, ViewOverError("a rank died")))
    bench.undo(ViewOverError("a rank died"))
    assert bench.attempt().bits() == whole
    assert bench.rounds == [COUNT - 1]


def test_what_breaks_behind_the_loop_repeats_its_last_round(bench: Bench, whole: list[Any]) -> None:
    for _ in range(2):  # a fault during the repeat, too
        bench.attempt()
        for parameter in bench.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(3.0)  # as the reduction and the clipping have it
        bench.undo()
    assert bench.attempt().bits() == whole
    assert bench.rounds == [COUNT - 1]


def test_faults_one_after_the_other_lose_nothing(bench: Bench, whole: list[Any]) -> None:
    for slot in (1, 2, 4):
        with pytest.raises(ViewOverError):
            bench.attempt(bench.end_view(slot))
        bench.undo(ViewOverError("a rank died"))
    bench.undo(ViewOverError("it broke before the loop"))
    assert bench.attempt().bits() == whole
    assert bench.rounds == [COUNT - 1]


def test_gradients_that_were_there_stay_the_tensors_they_are(bench: Bench, whole: list[Any]) -> None:
    before = [torch.zeros_like(parameter) for parameter in bench.model.parameters()]
    for parameter, zero in zip(bench.model.parameters(), before, strict=True):
        parameter.grad = zero
    with pytest.raises(ViewOverError):
        bench.attempt(bench.end_view(2))
    bench.undo()
    for parameter, zero in zip(bench.model.parameters(), before, strict=True):
        parameter.grad = zero.zero_()
    assert bench.attempt().bits() == whole
    assert all(p.grad is zero for p, zero in zip(bench.model.parameters(), before, strict=True))


def change_rank(bench: Bench) -> None:
    bench.data._assignment = (1, 2)


def change_size(bench: Bench) -> None:
    bench.data._assignment = (0, 3)


def change_weights(bench: Bench) -> None:
    bench.data.weights = (1.0, 1.0)


def start_again(bench: Bench) -> None:
    bench.engine.is_fresh_start = True


def commit(bench: Bench) -> None:
    bench.batches.forget()


@pytest.mark.parametrize("change", [change_rank, change_size, change_weights, start_again, commit])
def test_what_is_kept_is_of_this_rank_and_this_step_only(bench: Bench, change: Callable[[Bench], None]) -> None:
    with pytest.raises(ViewOverError):
        bench.attempt(bench.end_view(2))
    bench.undo()
    change(bench)
    bench.attempt()
    assert bench.rounds == list(bench.data._slots())


def test_another_step_begins_at_its_beginning(bench: Bench) -> None:
    with pytest.raises(ViewOverError):
        bench.attempt(bench.end_view(2))
    bench.undo()
    bench.attempt(number=6)
    assert bench.rounds == list(range(COUNT))


def raise_retryable(bench: Bench) -> BaseException:
    error = RetryableError("worth a second try")
    with pytest.raises(RetryableError):
        bench.attempt(bench.break_in(COUNT - 1, error))
    return error


def test_what_the_script_or_the_numbers_want_repeated_is_repeated(bench: Bench) -> None:
    bench.undo(raise_retryable(bench))
    bench.attempt()
    assert bench.rounds == list(range(COUNT))
    bench.undo(view=0)  # a number was suspicious: the same view
    bench.attempt()
    assert bench.rounds == list(range(COUNT))


def test_rounds_that_communicate_or_change_parameters_are_run_again(bench: Bench) -> None:
    def communicate(slot: int) -> None:
        bench.engine.collectives_begun += slot == 1
        bench.is_over = slot == 2

    with pytest.raises(ViewOverError):
        bench.attempt(communicate)
    bench.undo()
    for name in ("has_updated", "has_changed_parameters"):
        setattr(bench.transaction, name, True)
        with pytest.raises(ViewOverError):
            bench.attempt(bench.end_view(2))
        assert bench.rounds == [0, 1, 2]
        bench.undo()
        setattr(bench.transaction, name, False)
    bench.attempt()
    assert bench.rounds == list(range(COUNT))


def test_a_committed_step_is_not_left(bench: Bench) -> None:
    bench.transaction.is_committed = True
    bench.attempt(bench.end_view(2))
    assert bench.rounds == list(range(COUNT))


def test_without_a_session_nothing_is_kept_and_nothing_refused(bench: Bench) -> None:
    bench.engine.membership, total, step = None, 0, Step(bench, 0, 0)  # type: ignore[arg-type]
    for _ in step.batches(bench.data, keep=True):
        total += 1
    assert total == COUNT and bench.batches.finished is None


def test_a_loop_that_carries_a_sum_is_refused(bench: Bench) -> None:
    total, step = 0.0, Step(bench, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match=r"total is carried from one round to the next\. Add numbers up with step.ad"):
        for x in step.batches(bench.data, keep=True):
            total += float(x.sum())


class Settings(DistributedDataParallel):
    """DDP as far as its settings are looked at."""

    def __init__(self, **settings: bool) -> None:
        nn.Module.__init__(self)
        self.module = nn.Linear(1, 1)
        self.static_graph = self.find_unused_parameters = False
        vars(self).update(settings)


@pytest.mark.parametrize("setting", ["static_graph", "find_unused_parameters"])
def test_a_reducer_that_remembers_what_was_used_needs_all_rounds(bench: Bench, setting: str) -> None:
    bench.batches = MicroBatches(bench.engine, Tracked(model=Settings(**{setting: True})))
    with pytest.raises(ViewOverError):
        bench.attempt(bench.end_view(2))
    bench.undo()
    bench.attempt()
    assert bench.rounds == list(range(COUNT))


def gradients_of(parameters: list[nn.Parameter]) -> list[Any]:
    return [parameter.grad for parameter in parameters]


def test_copies_of_gradients_of_every_kind() -> None:
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(4)]
    parameters[1].grad = torch.full((2, 3), 2.0)
    parameters[2].grad = torch.full((3, 2), 3.0).t()
    parameters[3].grad = torch.ones(2, 3).to_sparse()
    gradients = GradientCopy()
    for factor in (1.0, 2.0):  # the second copy goes into the memory of the first
        for parameter in parameters[1:3]:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        gradients.take(parameters)
        parameters[0].grad, kept = torch.ones(2, 3), parameters[1].grad
        assert kept is not None
        kept.zero_()
        parameters[2].grad = parameters[3].grad = None
        gradients.put_back()
        found = gradients_of(parameters)
        assert found[0] is None and found[1] is kept
        assert torch.equal(kept, torch.full((2, 3), 2.0 * factor))
        assert torch.equal(found[2], torch.full((2, 3), 3.0 * factor))
        assert torch.equal(found[3].to_dense(), torch.ones(2, 3))
