"""Scripts for which a session cannot keep its promises end at their first steps, with a sentence that says what to
change; scripts that are near to them run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.core.records import IncidentOpened, ViewFormed
from support.jobs import SCRIPTS, Place

REFUSED = str(SCRIPTS / "refused.py")


def start(tmp_path: Path, *words: str, flags: Sequence[str] = ()) -> tuple[Place, int, str]:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *flags, REFUSED, *words)
    return job, agent.wait(), agent.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "nothing is tracked: name everything that makes up the state"),
        ("nothing_on_a_rank_that_ends_slowly", "nothing is tracked: name everything that makes up the state"),
        ("optimizer", "the optimizer AdamW updates parameters in this step and is not tracked"),
        pytest.param(
            "scheduler",
            "the scheduler StepLR sets a tracked optimizer's learning rate and is not tracked",
            marks=pytest.mark.long,
        ),
        pytest.param("average_by_hand", "weight of a Linear changes in this step", marks=pytest.mark.long),
        pytest.param("other_module", "weight of a Linear gets a gradient in this step", marks=pytest.mark.long),
        ("loader_by_hand", "write `for x, y in step.batches(loader):` in the step"),
        ("generator_by_hand", "the variable drawn is an iterator of the script's own"),
    ],
    ids=lambda text: text if text.isidentifier() else "",
)
def test_what_is_not_tracked_ends_the_job_at_once(tmp_path: Path, name: str, sentence: str) -> None:
    assert_refused(tmp_path, name, sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("stages_by_hand", "stage is not the same on ranks 0-1 (0.weight): ranks that hold different numbers cannot"),
        pytest.param("meter_of_a_rank", "(its structure or a plain value in it)", marks=pytest.mark.long),
        pytest.param("norms_of_each_rank", "(1.running_mean)", marks=pytest.mark.long),
        pytest.param("local_sgd", "model is not the same on ranks 0-1 (weight)", marks=pytest.mark.long),
        pytest.param("values_of_each_rank", "values named in job.track differ between ranks", marks=pytest.mark.long),
        pytest.param("other_names", "ranks 0-1 track different names", marks=pytest.mark.long),
    ],
    ids=lambda text: text if text.isidentifier() else "",
)
def test_ranks_with_different_numbers_are_no_replicas(tmp_path: Path, name: str, sentence: str) -> None:
    assert_refused(tmp_path, name, sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("counter_of_the_script", "do not make the same update in step 2"),
        pytest.param("counter_of_accumulated_steps", "do not make the same update in step", marks=pytest.mark.long),
        ("counter_that_matters_late", "is not the same on ranks 0-1"),
        ("steps_left_by_its_own_checkpoint", "the script makes 16 steps on rank 0 and 14 on rank 1"),
    ],
    ids=lambda text: text if text.isidentifier() else "",
)
def test_ranks_that_differ_after_a_recovery_end_the_job(tmp_path: Path, name: str, sentence: str) -> None:
    """What only the script counts is not known to a replacement: no run goes on with two kinds of numbers."""
    job, code, stderr = start(tmp_path, name, "16")
    assert code == 1, stderr[-3000:]
    why = job.journal.finished().why
    assert sentence in why, why
    assert "since step 2" in why or "is not the same" not in why, why
    assert len(job.journal.of(ViewFormed)) == 2, "nothing else is tried"


def test_what_the_script_counts_by_itself_is_named_in_the_first_step(tmp_path: Path) -> None:
    _, code, stderr = start(tmp_path, "position_by_hand")
    assert code == 0, stderr[-3000:]
    logs = "".join(path.read_text() for path in tmp_path.rglob("stderr.log"))
    assert "this step changes position of a Reader, which the script computes from what it was" in logs, logs[-3000:]


def test_a_restored_state_is_not_replaced_by_what_the_script_loads_after_it(tmp_path: Path) -> None:
    """At the first start that is warned of only: there is nothing to be replaced."""
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    _, code, stderr = start(tmp_path / "first", "loaded_after_track", "4", flags=flags)
    assert code == 0 and "the model's parameters are changed after job.track" in stderr, stderr[-3000:]
    job, code, stderr = start(tmp_path / "again", "loaded_after_track", "8", flags=flags)
    assert code == 1, stderr[-3000:]
    why = job.journal.finished().why
    assert "changed the model's parameters after job.track, which had restored them from step 4" in why, why
    assert not list(job.work.glob("final-*"))


def test_a_rank_that_leaves_the_loop_alone_is_named_as_the_reason(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", REFUSED, "left_by_one", "30")
    assert agent.wait() == 1
    assert "has left the loop of its steps, and others have not: leave it on all ranks" in job.journal.finished().why


def test_a_process_that_ends_with_code_0_in_a_step_is_replaced(tmp_path: Path) -> None:
    finals = []
    for name, words in (("undisturbed", ()), ("killed", ("kill",))):
        (tmp_path / name).mkdir()
        job, code, stderr = start(tmp_path / name, "vanishes", "8", *words)
        assert code == 0, stderr[-3000:]
        finals.append({path.name: path.read_text() for path in job.work.glob("final-*")})
        pids = {rank: len(list(job.work.glob(f"pid-{rank}-*"))) for rank in (0, 1)}
        assert pids == {0: 1, 1: 2 if words else 1}, "rank 0 stayed"
    assert finals[0] == finals[1] and len(finals[0]) == 2


def test_a_communication_hook_with_state_is_refused_also_after_track(tmp_path: Path) -> None:
    assert_refused(tmp_path, "compressing_hook", "powerSGD_hook keeps state of its own on each rank (PowerSGDState)")


def test_the_inner_module_of_a_wrapper_recovers_as_the_wrapper_does(tmp_path: Path) -> None:
    finals = []
    for name, words in (("undisturbed", ()), ("killed", ("kill",))):
        (tmp_path / name).mkdir()
        job, code, stderr = start(tmp_path / name, "inner_module", "8", *words)
        assert code == 0, stderr[-3000:]
        finals.append({path.name: path.read_text() for path in job.work.glob("final-*")})
        pids = {rank: len(list(job.work.glob(f"pid-{rank}-*"))) for rank in (0, 1)}
        assert pids == {0: 1, 1: 2 if words else 1}, "rank 0 stayed"
    assert finals[0] == finals[1] and len(finals[0]) == 2


@pytest.mark.parametrize("name", ["exit_with_0", pytest.param("break_out", marks=pytest.mark.long)])
def test_a_loop_that_all_ranks_leave_by_choice_is_the_end_of_the_training(tmp_path: Path, name: str) -> None:
    """What it came to is kept as after the last step."""
    directory = tmp_path / "checkpoints"
    job, code, stderr = start(tmp_path, name, flags=["--checkpoint-dir", str(directory)])
    assert code == 0, stderr[-3000:]
    assert len(list(job.work.glob("final-*"))) == 2 and not job.journal.of(IncidentOpened)
    assert [path.name for path in directory.iterdir() if path.is_dir() and path.name.startswith("step")], "a checkpoint"


def test_a_second_loop_of_steps_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, "epoch_loop", "write `for step in job.steps(epochs * n):` with")


def test_a_tracked_loader_is_not_looped_over_directly(tmp_path: Path) -> None:
    assert_refused(tmp_path, "loader_directly", "write `for x, y in step.batches(data):` inside `with step:`")


def test_epochs_go_on_where_they_were(tmp_path: Path) -> None:
    """A kill in the middle of an epoch, one in its first step, and one after its last, before what comes between two
    epochs is done: the same bits, every step once and in its epoch."""
    finals = []
    for name, kills in (("undisturbed", ()), ("killed", ("step-1", "step-4", "epoch-1"))):
        (tmp_path / name).mkdir()
        job, code, stderr = start(tmp_path / name, "epochs", "12", *kills)
        assert code == 0, stderr[-3000:]
        assert len(list(job.work.glob("killed-*"))) == len(kills)
        finals.append({path.name: path.read_text() for path in job.work.glob("final-*")})
        made = [line.split() for line in (job.work / "made-0").read_text().splitlines()]
        assert made == [[str(step // 4), str(step), str(1e-2 * 0.5 ** (step // 4))] for step in range(12)]
    assert finals[0] == finals[1] and len(finals[0]) == 2


def test_what_belongs_into_a_step_is_said_once_and_does_not_stop_a_recovery(tmp_path: Path) -> None:
    """After an aborted attempt the survivors run code that a replacement does not: its collectives wait for nobody."""
    finals = []
    for name, words in (("undisturbed", ()), ("killed", ("kill",))):
        (tmp_path / name).mkdir()
        job, code, stderr = start(tmp_path / name, "outside", "6", *words)
        assert code == 0, stderr[-3000:]
        finals.append({path.name: path.read_text() for path in job.work.glob("final-*")})
        pids = {rank: len(list(job.work.glob(f"pid-{rank}-*"))) for rank in (0, 1)}
        assert pids == {0: 1, 1: 2 if words else 1}, "rank 0 stayed"
        for text in ("a collective runs between two steps", "step.log is called after `with step:`"):
            assert stderr.count(text) == sum(pids.values()), "once per worker"
        assert "refused.py:" in stderr
        assert stderr.count("the variable noise is a random generator of the script's own") == 2, "at the start"
    assert finals[0] == finals[1] and len(finals[0]) == 2


def assert_refused(tmp_path: Path, name: str, sentence: str) -> None:
    """The job ends with the sentence, with code 1, and has tried nothing else."""
    job, code, stderr = start(tmp_path, name)
    assert code == 1, stderr[-3000:]
    end = job.journal.finished()
    assert end.cause is not None and end.cause.fault is not None and end.cause.fault.name == "script-refused", end.why
    assert sentence in end.why, end.why
    assert len(job.journal.of(ViewFormed)) == 1 and len(job.journal.of(IncidentOpened)) == 1, "tried once"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("no_state", marks=pytest.mark.long),
        pytest.param("ignored_optimizer", marks=pytest.mark.long),
        pytest.param("sequential_scheduler", marks=pytest.mark.long),
        "loader_of_an_evaluation",
        pytest.param("norms_of_rank_0", marks=pytest.mark.long),
    ],
)
def test_what_is_tracked_or_declared_runs(tmp_path: Path, name: str) -> None:
    job, code, stderr = start(tmp_path, name)
    assert code == 0, stderr[-3000:]
    assert len(list(job.work.glob("final-*"))) == 2
