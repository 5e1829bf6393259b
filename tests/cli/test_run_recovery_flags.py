"""The flags of recoveries: their values, what is refused, what the start says, and how they reach master and agent."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from holdfast.cli.capabilities import capabilities, check_checkpoint_dir, checkpoint_dir
from holdfast.cli.run_flags import RunOptions, master_endpoint, parse_run
from holdfast.core.records import JobCreated, NodeJoined
from holdfast.core.strategies import LADDER, Strategy
from holdfast.errors import UsageError
from support.jobs import SPAWN, STEPS, Place

HOME = {"HOME": "/home/ada"}


def parsed(words: str, **environ: str) -> RunOptions:
    return parse_run([*shlex.split(words), "train.py"], HOME | environ)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--recovery dump,retry", "recovery", (Strategy.RETRY, Strategy.DUMP, Strategy.EXIT)),
        ("--recovery 'exit, recover ,exit,recover'", "recovery", (Strategy.RECOVER, Strategy.EXIT)),
        ("--recovery exit", "recovery", (Strategy.EXIT,)),
        ("--recovery dump,exit,elastic-training,recover,recover-in-place,retry", "recovery", LADDER),
        ("--spares 2", "spares", 2),
        ("--spares 0 --recovery retry", "spares", 0),
        ("--replicas 0", "replicas", 0),
        ("--replica-parity 2 --nnodes 2", "replica_parity", 2),
        ("--failure-domain rack-7", "failure_domain", "rack-7"),
        ("--checkpoint-dir=~/runs/{job_id}", "checkpoint_dir", "/home/ada/runs/{job_id}"),
        ("--checkpoint-dir ''", "checkpoint_dir", None),
        ("--hang-timeout auto", "hang_timeout_s", None),
        ("--hang_timeout 0", "hang_timeout_s", 0.0),
        ("--hang-timeout 1.5", "hang_timeout_s", 1.5),
        ("--cordon-limit 7", "cordon_limit", "7"),
        ("--cordon-limit 0.5%", "cordon_limit", "0.5%"),
        ("--wait-for-nodes 60", "wait_for_nodes_s", 60.0),
        ("--wait-for-nodes auto", "wait_for_nodes_s", 0.0),
        ("--dynamic_failover_extension a.b::C", "dynamic_failover_extension", "a.b::C"),
        ("--dynamic-failover-extension=a::C", "dynamic_failover_extension", "a::C"),
        ("--nnodes 2 --spare-nodes 1 --node-rank 2", "node_rank", 2),
        ("--nnodes 2:3 --spare-nodes 2", "nodes_most", 5),
    ],
)
def test_values(words: str, field: str, value: object) -> None:
    assert getattr(parsed(words), field) == value


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"HOLDFAST_RECOVERY": "dump"}, "recovery", (Strategy.DUMP, Strategy.EXIT)),
        ({"HOLDFAST_RECOVERY": "", "HOLDFAST_SPARES": "3"}, "spares", 3),
        ({"HOLDFAST_HANG_TIMEOUT": "7"}, "hang_timeout_s", 7.0),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "wait_for_nodes_s", 600.0),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOLDFAST_WAIT_FOR_NODES": "0"}, "wait_for_nodes_s", 0.0),
        ({"HOLDFAST_DYNAMIC_FAILOVER_EXTENSION": "a::C"}, "dynamic_failover_extension", "a::C"),
    ],
)
def test_values_from_the_environment(environ: dict[str, str], field: str, value: object) -> None:
    assert getattr(parsed("", **environ), field) == value


REFUSALS = {
    "--recovery ''": (
        "--recovery : there is no strategy '', choose from retry,recover-in-place,recover,elastic-training,dump,exit"
    ),
    "--recovery retry,,exit": (
        "--recovery retry,,exit: there is no strategy '',"
        " choose from retry,recover-in-place,recover,elastic-training,dump,exit"
    ),
    "--recovery recover_in_place": (
        "--recovery recover_in_place: there is no strategy 'recover_in_place', did you mean recover-in-place?"
    ),
    "--recovery retry,wait": (
        "--recovery retry,wait: there is no strategy 'wait',"
        " choose from retry,recover-in-place,recover,elastic-training,dump,exit"
    ),
    "--spares -1": "--spares -1: give a whole number, 0 to 65536",
    "--spare-nodes one": "--spare-nodes one: give a whole number, 0 to 1000000",
    "--replicas 0.5": "--replicas 0.5: give a whole number, 0 to 1000000",
    "--replica-parity 1 --nnodes 2": (
        "--replica-parity 1 does not fit --nnodes 2: a group has at least 2 nodes, and at most as many as there are"
    ),
    "--replica-parity 3 --nnodes 2": (
        "--replica-parity 3 does not fit --nnodes 2: a group has at least 2 nodes, and at most as many as there are"
    ),
    "--spare 1": "--spare is ambiguous: write --spares or --spare-nodes",
    "--hang-timeout never": (
        "--hang-timeout never: give auto, or a time in seconds as in 60, or 0 for no hang detection"
    ),
    "--cordon-limit 101%": "--cordon-limit 101%: give a number of nodes like 5, or a share of them like 1%",
    "--cordon-limit few": "--cordon-limit few: give a number of nodes like 5, or a share of them like 1%",
    "--wait-for-nodes ever": ("--wait-for-nodes ever: give auto, or a time in seconds as in 600, or 0 for no wait"),
    "--hang-timeout -1": ("--hang-timeout -1: give auto, or a time in seconds as in 60, or 0 for no hang detection"),
    "--dynamic-failover-extension mine": (
        "--dynamic-failover-extension mine: give module::Class, as in my_package.failover::Mine"
    ),
    "--dynamic_failover_extension=mine.py::Mine::x": (
        "--dynamic-failover-extension mine.py::Mine::x: give module::Class, as in my_package.failover::Mine"
    ),
    "--spares 1 --recovery retry,dump": (
        "--spares 1 has no effect, because --recovery retry,dump leaves out recover, which uses spares:"
        " add recover to --recovery, or drop --spares"
    ),
    "--spare-nodes 1 --rdzv-endpoint a:7 --recovery retry": (
        "--spare-nodes 1 has no effect, because --recovery retry leaves out recover, which uses spares:"
        " add recover to --recovery, or drop --spare-nodes"
    ),
    "--standalone --spare-nodes 1": "--standalone is for one node: drop it, or --spare-nodes 1",
    "--spare-nodes 1 --rdzv-backend c10d": (
        "--rdzv-backend c10d needs an address at which up to 2 nodes meet:"
        " give each of them the same --rdzv-endpoint HOST:PORT"
    ),
    "--spare-nodes 1 --rdzv-endpoint a:0": (
        "--rdzv-endpoint a:0: the other nodes cannot know which free port is taken, give a port above 0"
    ),
    "--nnodes 2 --spare-nodes 1 --node-rank 3": (
        "--node-rank 3 does not fit --nnodes 2: ranks of nodes go from 0 to 2, lower the rank or raise --nnodes"
    ),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_work_is_refused_with_one_sentence(words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(words)
    assert str(refused.value) == REFUSALS[words]


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        ("--spare-nodes 1", ("127.0.0.1", 29500)),
        ("--spare-nodes 1 --rdzv-endpoint node0:7", ("node0", 7)),
    ],
)
def test_spare_nodes_must_find_the_master_as_others_do(words: str, endpoint: tuple[str, int]) -> None:
    assert master_endpoint(parsed(words)) == endpoint


# --- checkpoints


@pytest.mark.parametrize(
    ("words", "job_id", "directory"),
    [
        ("--state-dir /home/ada/.holdfast", "job/7", "/home/ada/.holdfast/jobs/job_7/checkpoints"),
        ("--state-dir /data", "demo", "/data/jobs/demo/checkpoints"),
        ("--state-dir /data", "", "/data/jobs/{job_id}/checkpoints"),
        ("--checkpoint-dir /shared", "demo", "/shared"),
        ("--checkpoint-dir /shared/{job_id}/all", "demo", "/shared/demo/all"),
    ],
)
def test_where_checkpoints_go(words: str, job_id: str, directory: str) -> None:
    assert checkpoint_dir(parsed(words), job_id) == directory


def test_a_relative_directory_is_the_agents_and_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_dir(parsed("--checkpoint-dir runs"), "demo") == str(tmp_path / "runs")


@pytest.fixture
def unwritable(tmp_path: Path) -> str:
    """A directory that cannot be: it would be inside a file. (Root may write into any other.)"""
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize("words", ["--checkpoint-dir {}", "--state-dir {} --recovery dump"])
def test_a_dump_that_was_asked_for_and_cannot_be_written_is_refused(unwritable: str, words: str) -> None:
    options = parsed(words.format(unwritable))
    with pytest.raises(UsageError, match=r"file is not a directory\. Name another directory with --checkpoint-dir"):
        check_checkpoint_dir(options, checkpoint_dir(options, "demo"))


@pytest.mark.parametrize("words", ["--checkpoint-dir {} --recovery retry", "--state-dir {}"])
def test_where_no_dump_was_asked_for_a_directory_that_cannot_be_written_is_no_obstacle(
    unwritable: str, words: str
) -> None:
    options = parsed(words.format(unwritable))
    check_checkpoint_dir(options, checkpoint_dir(options, "demo"))


def test_looking_at_the_directory_makes_nothing(tmp_path: Path) -> None:
    options = parsed(f"--checkpoint-dir {tmp_path}/a/b")
    check_checkpoint_dir(options, checkpoint_dir(options, "demo"))
    assert os.listdir(tmp_path) == []


# --- what is said at start


def test_the_line_says_what_is_allowed_and_what_there_is_for_it(tmp_path: Path) -> None:
    options = parsed(f"--spares 1 --nnodes 2:4 --max-restarts 3 --checkpoint-dir {tmp_path}")
    assert capabilities(options, str(tmp_path)) == (
        "recovery: retry; recover-in-place; recover (1 spare per node, 0 spare nodes); elastic-training (2 nodes at"
        f" least); dump (to {tmp_path}); exit. 1 copy of each shard, snapshots as often as they cost nothing, a"
        " checkpoint every 600 s, hangs are detected by the job's own step times. Scripts that do not call hf.init()"
        " get restarts only (--max-restarts 3)"
    )


def test_the_line_of_a_job_that_may_do_nothing() -> None:
    assert capabilities(parsed("--recovery exit --hang-timeout 0 --replicas 0"), "/") == (
        "recovery: exit. 0 copies of each shard, snapshots as often as they cost nothing, hangs are detected never."
        " Scripts that do not call hf.init() get restarts only (--max-restarts 0)"
    )


def test_the_line_says_that_a_dump_is_impossible(unwritable: str) -> None:
    assert "dump (impossible: " in capabilities(parsed(f"--state-dir {unwritable}"), unwritable)


# --- a job


@pytest.mark.usefixtures("leak_guard")
def test_the_flags_reach_the_settings_of_the_job(tmp_path: Path) -> None:
    job = Place(tmp_path)
    flags = ("--recovery", "dump,recover", "--spares", "1", "--replicas", "2", "--hang-timeout", "0")
    agent = job.start("--standalone", *flags, "--failure-domain", "rack-7", *SPAWN, STEPS)
    job.finish()
    assert agent.wait() == 0
    settings = job.journal.of(JobCreated)[0].settings
    assert settings.recovery == (Strategy.RECOVER, Strategy.DUMP, Strategy.EXIT)
    assert (settings.spares, settings.spare_nodes, settings.replicas) == (1, 0, 2)
    info = job.journal.of(NodeJoined)[0].info
    assert info.domain == "rack-7" and info.bulk_port > 0
    assert "recovery: recover (1 spare per node" in agent.stderr


@pytest.mark.usefixtures("leak_guard")
def test_a_checkpoint_directory_that_cannot_be_written_is_refused_at_start(tmp_path: Path, unwritable: str) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--checkpoint-dir", unwritable, *SPAWN, STEPS)
    assert agent.wait() == 2
    assert "dump cannot write a checkpoint to" in agent.stderr
    assert job.journal.path is None
