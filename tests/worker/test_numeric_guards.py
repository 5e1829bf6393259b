"""Guards of a run's numbers: checksums by majority, and a barrier that names who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

import holdfast
from holdfast.core.shard_map import ShardMap
from holdfast.data.loader import Loader
from holdfast.errors import CorruptionError, MissingRanksError, ViewOverError
from holdfast.state.tracked import Tracked
from holdfast.wire.progress_page import ProgressPage
from holdfast.worker.collectives import groups
from holdfast.worker.param_checksums import ParamChecksums, checksum, verdict
from holdfast.worker.transaction import StepTransaction
from holdfast.worker.undo_copy import UndoCopy
from support.crowd import Crowd, Member, together

DEADLINE_S = 30.0
TENSORS = [torch.randn(17, 3), torch.randn(5).to(torch.bfloat16), torch.arange(4), torch.tensor([True, False])]


@pytest.mark.parametrize("number", range(len(TENSORS)))
def test_a_flipped_bit_changes_the_checksum(number: int) -> None:
    before = checksum(TENSORS)
    assert checksum([tensor.clone() for tensor in TENSORS]) == before
    changed = [tensor.clone() for tensor in TENSORS]
    changed[number].view(-1).view(torch.uint8)[1] ^= 1
    assert checksum(changed) != before


def test_the_order_of_tensors_counts_and_strides_do_not() -> None:
    first, second = torch.randn(4, 6), torch.randn(4, 6)
    assert checksum([first, second]) != checksum([second, first])
    assert checksum([first.t().contiguous().t()]) == checksum([first])


@pytest.mark.parametrize(
    ("sums", "shards", "wrong"),
    [
        ([5, 5, 5], 1, {}),
        ([5, 7, 5], 1, {1: "differ from those of ranks 0, 2"}),
        ([5, 7, 5, 8], 1, {0: "majority", 1: "majority", 2: "majority", 3: "majority"}),
        ([5, 7], 1, {0: "majority", 1: "majority"}),
        ([5, 6, 5, 6, 5, 9], 2, {5: "differ from those of ranks 1, 3"}),
        ([5, 6, 7, 8], 4, {}),  # nobody has the same
    ],
)
def test_who_differs_is_found_by_majority(sums: list[int], shards: int, wrong: dict[int, str]) -> None:
    found = {rank: text for rank in range(len(sums)) if (text := verdict(sums, rank, ShardMap(shards)))}
    assert found.keys() == wrong.keys()
    assert all(wrong[rank] in found[rank] for rank in wrong)


@pytest.mark.parametrize(
    ("models", "who"), [([1.0, 2.0], {0, 1}), ([1.0, 1.0, 2.0], {2}), ([1.0, 1.0, 1.0], set())], ids=str
)
def test_when_the_first_rank_says_so_all_have_discarded_what_may_be_wrong(models: list[float], who: set[int]) -> None:
    """The job may end with the first."""
    meeting = threading.Barrier(len(models), timeout=DEADLINE_S)
    rows: list[list[int]] = [[] for _ in models]
    discarded = dict[int, int]()
    seen = dict[int, set[int]]()

    def live(rank: int) -> None:
        def gather(values: Sequence[int]) -> list[list[int]]:
            rows[rank] = list(values)
            meeting.wait()
            found = [list(row) for row in rows]
            meeting.wait()
            return found

        def distrust(step: int) -> None:
            time.sleep(0.2 * rank)
            discarded[rank] = step

        guard = ParamChecksums(lambda: [torch.full((3,), model)], 1, distrust)
        model = 0.0
        guard.before_commit(1, rank, ShardMap(), gather)
        model = models[rank]
        try:
            guard.before_commit(2, rank, ShardMap(), gather)
        except CorruptionError:
            seen[rank] = set(discarded)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert seen == dict.fromkeys(who, who) and discarded == dict.fromkeys(who, 1)


@pytest.mark.parametrize("keeps_copy", [False, True])
def test_a_step_that_is_passed_over_leaves_the_model_and_counts_all_the_same(keeps_copy: bool) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    samples = torch.ones(8, 2)
    samples[2] = float("nan")
    data = Loader(samples, global_batch_size=2, shuffle=False, rank=0, world_size=1)
    tracked = Tracked(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    is_bad = False

    def barrier() -> None:
        if is_bad:
            transaction.drop_update()

    def before_update(*_: object) -> None:
        if transaction.begin_update(optimizer):
            with transaction.committing():
                barrier()
        transaction.updating()

    transaction = StepTransaction(tracked, ProgressPage.private(), UndoCopy(tracked))
    optimizer.register_step_pre_hook(before_update)
    states, rates, bad = [], [], []
    for _ in range(4):
        transaction.keeps_copy = keeps_copy
        transaction.remember()
        transaction.begin()
        batches = [batch.clone() for batch in data.step_batches()]
        is_bad = any(bool(batch.isnan().any()) for batch in batches)
        bad.append(is_bad)
        for batch in batches:
            model(batch).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if transaction.end_body():
            with transaction.committing():
                barrier()
        transaction.close()
        data.commit_drawn()
        states.append(checksum(model.state_dict().values()))
        rates.append(optimizer.param_groups[0]["lr"])
    assert states[1] == states[0] != states[2] != states[3], "not even its averages are changed"
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    assert rates == [0.5, 0.25, 0.125, 0.0625], "the schedule is by steps"
    assert bad == [False, True, False, False], "and the batch is not given again"


def come(member: Member, rank: int, size: int, latecomer: int) -> str:
    member.start(rank, size)
    groups.barrier("first", 30.0)
    if rank == latecomer:
        member.hear("told")
        return "late"
    try:
        groups.barrier("second", 0.3)
    except MissingRanksError as error:
        assert error.ranks == (latecomer,)
        if rank == 0:
            member.say("told")
        return str(error)
    return "met"


def test_a_barrier_names_who_is_missing_and_prints_nothing_while_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    said = together(come, 3, 1)
    assert said == ["rank 1 of 3 did not come to the barrier in 0.3 s", "late", said[0]]
    assert "timed out" not in capfd.readouterr().err


def test_scripts_can_name_the_error_of_a_barrier() -> None:
    assert holdfast.MissingRanksError is MissingRanksError


def wait_long(member: Member) -> str:
    member.start(0, 2)
    member.say("in")
    try:
        groups.barrier("never", 60.0)
    except ViewOverError as error:
        return str(error)
    return "met"


def end_view(member: Member) -> str:
    import threading

    member.start(1, 2)
    member.hear("in")
    threading.Timer(0.0, groups.revoke, ("somebody died",)).start()
    try:
        groups.barrier("other", 60.0)
    except ViewOverError as error:
        return str(error)
    return "met"


def test_the_end_of_the_view_ends_the_wait() -> None:
    with Crowd() as crowd:
        crowd.add(wait_long)
        crowd.add(end_view)
        crowd.hear("in")
        assert crowd._result(1, __import__("time").monotonic() + 30) == "somebody died"
