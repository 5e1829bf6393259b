"""The command line of `holdfast run`: parity with torchrun, our own flags, refusals, the doc."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from holdfast.cli.run import check_logs_specs
from holdfast.cli.run_flag_table import FLAGS, GROUPS, Flag
from holdfast.cli.run_flag_values import cordon_limit
from holdfast.cli.run_flags import RunOptions, build_parser, parse_run
from holdfast.core.settings import Settings
from holdfast.core.strategies import LADDER
from holdfast.errors import UsageError

HOME = {"HOME": "/home/ada"}
DOC = (Path(__file__).parents[2] / "docs" / "torchrun.md").read_text()

# torchrun's default -> ours. Nothing else may differ, and docs/torchrun.md says why these do.
DIFFERENT_DEFAULTS = {"start_method": ("spawn", "forkserver"), "node_rank": (0, None)}

# A value for each flag that takes one, different from its default.
SAMPLES = {
    "keep_jobs": "30d",
    "nnodes": "1:3",
    "nproc_per_node": "4",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "node0:29401",
    "rdzv_id": "job7",
    "rdzv_conf": "join_timeout=60",
    "max_restarts": "3",
    "monitor_interval": "2.5",
    "start_method": "spawn",
    "event_log_handler": "console",
    "role": "trainer",
    "log_dir": "/var/log/job",
    "redirects": "0:1,1:2",
    "tee": "3",
    "local_ranks_filter": "0,2",
    "duplicate_stdout_filters": "apple,a,,b",
    "duplicate_stderr_filters": "pear",
    "node_rank": "1",
    "master_addr": "10.0.0.1",
    "master_port": "29501",
    "local_addr": "10.0.0.2",
    "logs_specs": "custom",
    "numa_binding": "socket",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "7",
    "node_id": "node-7",
    "state_dir": "/var/holdfast",
    "token_file": "/run/token",
    "tls_cert": "/tls/cert",
    "tls_key": "/tls/key",
    "tls_ca": "/tls/ca",
    "settle": "1.5",
    "heartbeat_interval": "2",
    "silence_timeout": "20",
    "reconnect_grace": "1",
    "master_timeout": "90",
    "farewell_timeout": "7",
    "guard_window": "60",
    "restart_grace": "2",
    "preload": "numpy,transformers.models",
    "log_format": "json",
    "error_format": "torchrun",
    "recovery": "exit,retry",
    "spares": "2",
    "spare_nodes": "1",
    "replicas": "2",
    "replica_parity": "3",
    "failure_domain": "rack-7",
    "snapshots": "10",
    "snapshot_dir": "/dev/shm/mine",
    "checkpoint_dir": "/shared/{job_id}",
    "checkpoint_every": "10m",
    "checkpoint_keep": "last:2,every:1000",
    "hang_timeout": "90",
    "dynamic_failover_extension": "my.failover::Mine",
    "fault_table": "/etc/faults.toml",
    "cordon_limit": "5",
    "wait_for_nodes": "60",
    "machine": "rack3-gpu17",
    "straggler_action": "swap",
    "straggler_interval": "2.5",
    "collective_retries": "3",
    "accelerator": "cuda",
}


def torch_parser() -> argparse.ArgumentParser:
    return torchrun.get_args_parser()


def torch_actions() -> list[argparse.Action]:
    return [action for action in torch_parser()._actions if action.option_strings and action.dest != "help"]


def our_action(dest: str) -> argparse.Action:
    return next(action for action in build_parser()._actions if action.dest == dest)


def values_of(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    found = vars(parser.parse_args(words))
    return {name: value for name, value in found.items() if name != "given"}


def torchs_part(found: dict[str, Any]) -> dict[str, Any]:
    """What torchrun knows of, with the documented defaults taken back to torchrun's."""
    ours = {flag.dest for flag in FLAGS if flag.is_ours}
    back = {name: theirs for name, (theirs, mine) in DIFFERENT_DEFAULTS.items() if found[name] == mine}
    return {name: value for name, value in found.items() if name not in ours} | back


def parsed(words: str, **environ: str) -> RunOptions:
    return parse_run([*shlex.split(words), "train.py"], HOME | environ)


def refusal(words: str, environ: dict[str, str] | None = None, script: str = "train.py") -> str:
    with pytest.raises(UsageError) as caught:
        parse_run([*shlex.split(words), *script.split()], HOME | (environ or {}))
    sentence = str(caught.value)
    assert "\n" not in sentence and "usage" not in sentence
    return sentence


# Parity with torchrun.


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        if flag.variable:
            monkeypatch.delenv(flag.variable, raising=False)


@pytest.mark.parametrize("theirs", torch_actions(), ids=lambda action: action.dest)
def test_each_flag_of_torchrun_exists_with_its_spellings_and_default(theirs: argparse.Action) -> None:
    ours = our_action(theirs.dest)
    assert set(theirs.option_strings) <= set(ours.option_strings)
    assert (ours.nargs, ours.const) == (theirs.nargs, theirs.const)
    assert list(ours.choices or []) == list(theirs.choices or [])
    if theirs.dest in DIFFERENT_DEFAULTS:
        assert (theirs.default, ours.default) == DIFFERENT_DEFAULTS[theirs.dest]
    else:
        assert ours.default == theirs.default


@pytest.mark.parametrize("theirs", torch_actions(), ids=lambda action: action.dest)
def test_each_spelling_gives_what_torchrun_reads(theirs: argparse.Action) -> None:
    for spelling in theirs.option_strings:
        words = [spelling] if theirs.nargs == 0 else [spelling, SAMPLES[theirs.dest]]
        expected = values_of(torch_parser(), [*words, "train.py", "-x"])
        assert torchs_part(values_of(build_parser(), [*words, "train.py", "-x"])) == expected


@pytest.mark.parametrize("theirs", torch_actions(), ids=lambda action: action.dest)
def test_each_pet_variable_gives_what_torchrun_reads(theirs: argparse.Action, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"PET_{theirs.dest.upper()}"
    for text in ["0", "1"] if theirs.nargs == 0 else [SAMPLES[theirs.dest]]:
        monkeypatch.setenv(variable, text)
        expected = values_of(torch_parser(), ["train.py"])
        assert torchs_part(values_of(build_parser({variable: text}), ["train.py"])) == expected


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.metavar], ids=lambda flag: flag.dest)
def test_a_flag_overrules_its_variable(flag: Flag) -> None:
    if flag.variable is None:
        return
    sample = SAMPLES[flag.dest]
    from_flag = build_parser({flag.variable: "not read at all"}).parse_args([flag.name, sample, "train.py"])
    from_variable = build_parser({flag.variable: sample}).parse_args(["train.py"])
    assert getattr(from_flag, flag.dest) == getattr(from_variable, flag.dest) != flag.default


def test_the_process_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        if flag.variable:
            monkeypatch.setenv(flag.variable, "nonsense")
    assert parse_run(["train.py"], HOME).nnodes_max == 1


def is_understood(action: argparse.Action, prefix: str) -> bool:
    """Whether one flag of torchrun begins so. (argparse itself counts the two spellings of one flag as two.)"""
    return all(
        other.dest == action.dest or not any(spelling.startswith(prefix) for spelling in other.option_strings)
        for other in torch_parser()._actions
    )


@pytest.mark.parametrize("theirs", torch_actions(), ids=lambda action: action.dest)
def test_each_abbreviation_of_a_torchrun_flag_means_that_flag(theirs: argparse.Action) -> None:
    for spelling in (spelling for spelling in theirs.option_strings if spelling.startswith("--")):
        for prefix in (spelling[:length] for length in range(3, len(spelling) + 1)):
            value = [] if theirs.nargs == 0 else [SAMPLES[theirs.dest]]
            if is_understood(theirs, prefix) or prefix == spelling:
                found = build_parser().parse_args([prefix, *value, "train.py"])
                assert list(found.given) == [theirs.dest], prefix


WORDS = st.sampled_from(
    shlex.split(
        "--standalone -m -mr3 -r -t2 -r=1 3 --tee --nnodes --nnodes=2 1:2 --max-restarts -- - train.py --lr -5"
        " '-x y' '' --rdzv_conf a=b --no-python --module=1 --role="
    )
)


@given(words=st.lists(WORDS, max_size=7))
@settings(max_examples=400, deadline=None)
def test_whatever_torchrun_accepts_means_the_same_here(words: list[str]) -> None:
    try:
        expected = values_of(TORCH, words)
    except SystemExit:
        return
    # An empty script name is an unset variable of the user's shell, -5 a mistyped flag; torchrun fails later.
    runs = re.match(r"-$|[^-]", str(expected["training_script"])) and int(str(expected["max_restarts"])) >= 0
    if runs:
        assert torchs_part(values_of(build_parser(), words)) == expected


class _Quiet(argparse.ArgumentParser):
    """torchrun's parser, whose usage pages would fill the screen."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise SystemExit(2)


TORCH = torch_parser()
TORCH.__class__ = _Quiet


@pytest.mark.parametrize(
    ("words", "script", "arguments"),
    [
        ("train.py --log x --nproc 3", "train.py", ["--log", "x", "--nproc", "3"]),
        ("--nproc 2 train.py --nnodes 3", "train.py", ["--nnodes", "3"]),
        ("train.py -- --lr 1", "train.py", ["--lr", "1"]),
        ("-- train.py -- --lr 1", "train.py", ["--", "--lr", "1"]),
        ("train.py a -- b", "train.py", ["a", "--", "b"]),
        ("train.py --help", "train.py", ["--help"]),
        ("-m package.train -h", "package.train", ["-h"]),
    ],
)
def test_what_follows_the_script_is_the_scripts(words: str, script: str, arguments: list[str]) -> None:
    options = parse_run(words.split(), HOME)
    assert (options.script, options.script_args) == (script, tuple(arguments))


# Values.


def test_defaults() -> None:
    assert parse_run(["train.py"], HOME) == RunOptions(
        nnodes_min=1,
        nnodes_max=1,
        nproc_per_node="1",
        node_rank=None,
        node_id=None,
        rdzv_backend="static",
        rdzv_endpoint="",
        rdzv_id="none",
        rdzv_conf={},
        standalone=False,
        master_addr="127.0.0.1",
        master_port=None,
        local_addr=None,
        is_host=None,
        join_timeout_s=600.0,
        settle_s=0.5,
        script="train.py",
        script_args=(),
        module=False,
        no_python=False,
        run_path=False,
        python_exec="",
        start_method="forkserver",
        preload=("auto",),
        role="default",
        numa_binding=None,
        virtual_local_rank=False,
        signals_to_handle=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"),
        shutdown_timeout_s=30.0,
        log_dir=None,
        redirects=0,
        tee=0,
        local_ranks_filter=None,
        duplicate_stdout_filters=(),
        duplicate_stderr_filters=(),
        log_line_prefix_template="",
        log_format="auto",
        verbose=False,
        error_format="holdfast",
        event_log_handler="null",
        logs_specs=None,
        max_restarts=0,
        recovery=LADDER,
        spares=0,
        spare_nodes=0,
        are_replicas_default=True,
        replicas=1,
        replica_parity=0,
        failure_domain=None,
        snapshots=0,
        snapshot_dir=None,
        checkpoint_dir=None,
        checkpoint_every=None,
        checkpoint_keep="last:3",
        hang_timeout_s=None,
        dynamic_failover_extension=None,
        fault_table=None,
        cordon_limit="1%",
        wait_for_nodes_s=0.0,
        straggler_action="report",
        collective_retries=0,
        straggler_interval_s=5.0,
        machine=None,
        keep_jobs=90 * 86_400.0,
        state_dir="~/.holdfast",
        heartbeat_interval_s=1.0,
        silence_timeout_s=5.0,
        reconnect_grace_s=0.3,
        master_timeout_s=120.0,
        farewell_timeout_s=60.0,
        guard_window_s=30.0,
        restart_grace_s=5.0,
        monitor_interval_s=0.1,
        node_check=False,
        network_check=False,
        exclude_straggler=False,
        accelerator=None,
        token_file=None,
        tls_cert=None,
        tls_key=None,
        tls_ca=None,
    )


def test_defaults_of_the_flags_are_those_of_the_core() -> None:
    options, core = parse_run(["train.py"], HOME), Settings()
    shared = set(RunOptions.__struct_fields__) & set(Settings.__struct_fields__)
    assert {"settle_s", "join_timeout_s", "heartbeat_interval_s", "silence_timeout_s", "guard_window_s"} <= shared
    assert {"recovery", "spares", "spare_nodes", "replicas"} <= shared
    for name in shared - {"cordon_limit"}:
        assert getattr(options, name) == getattr(core, name), name
    assert cordon_limit(options.cordon_limit) == (core.cordon_limit, core.cordon_share)
    assert (options.nnodes_min, options.nnodes_max) == (core.nodes_min, core.nodes_max)
    assert options.max_restarts == core.restarts_max


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--nnodes 3 --rdzv-endpoint a", "nnodes_min", 3),
        ("--nnodes 3 --rdzv-endpoint a", "nnodes_max", 3),
        ("--nnodes 2:5 --rdzv-endpoint a", "nnodes_min", 2),
        ("--nnodes 2:5 --rdzv-endpoint a", "nnodes_max", 5),
        ("--nproc-per-node auto", "nproc_per_node", "auto"),
        ("--nproc-per-node npu", "nproc_per_node", "npu"),
        ("--nproc-per-node ' 8'", "nproc_per_node", "8"),
        ("--node-rank 0", "node_rank", 0),
        ("--rdzv-conf 'a=1, b = c=d'", "rdzv_conf", {"a": "1", "b": "c=d"}),
        ("--rdzv-conf join_timeout=60", "join_timeout_s", 60.0),
        ("--rdzv-conf timeout=61", "join_timeout_s", 61.0),
        ("--rdzv-conf timeout=61,join_timeout=60", "join_timeout_s", 60.0),
        ("--rdzv-conf last_call_timeout=4", "settle_s", 4.0),
        ("--rdzv-conf last_call_timeout=4 --settle 0.5", "settle_s", 0.5),
        ("--settle 0", "settle_s", 0.0),
        ("--rdzv-conf is_host=True", "is_host", True),
        ("--rdzv-conf is_host=0", "is_host", False),
        ("-r 2", "redirects", 2),
        ("-r 0:1,12:3", "redirects", {0: 1, 12: 3}),
        ("-t 3", "tee", 3),
        ("--local-ranks-filter 0,11", "local_ranks_filter", frozenset({0, 11})),
        ("--duplicate-stdout-filters a,b,,c", "duplicate_stdout_filters", ("a", "b,c")),
        ("--signals-to-handle 'SIGTERM, SIGUSR2'", "signals_to_handle", ("SIGTERM", "SIGUSR2")),
        ("--shutdown-timeout 2.5", "shutdown_timeout_s", 2.5),
        ("--start-method fork", "start_method", "forkserver"),
        ("--start-method spawn", "start_method", "spawn"),
        ("--preload 'numpy, a.b'", "preload", ("numpy", "a.b")),
        ("--keep-jobs 2w", "keep_jobs", 1_209_600.0),
        ("--keep-jobs forever", "keep_jobs", None),
        ("--state-dir=~/runs", "state_dir", "/home/ada/runs"),
        ("--state-dir runs", "state_dir", "runs"),
        ("--token_file=~/token", "token_file", "/home/ada/token"),
        ("--log-dir ''", "log_dir", None),
        ("--max-restarts 1 --max-restarts 2", "max_restarts", 2),
        ("--rdzv-backend etcd-v2", "rdzv_backend", "etcd-v2"),
        ("--rdzv-endpoint ' host:1 '", "rdzv_endpoint", "host:1"),
        ("--node_id gpu-17.rack:3", "node_id", "gpu-17.rack:3"),
        ("--nproc-per-nod 2", "nproc_per_node", "2"),
    ],
)
def test_values(words: str, field: str, value: object) -> None:
    assert getattr(parsed(words), field) == value


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, "shutdown_timeout_s", 9.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9", "PET_SHUTDOWN_TIMEOUT": "8"}, "shutdown_timeout_s", 8.0),
        ({"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}, "log_line_prefix_template", "[${rank}]"),
        ({"PYTHON_EXEC": "/usr/bin/python3"}, "python_exec", "/usr/bin/python3"),
        ({"PET_NODE_RANK": "0"}, "node_rank", 0),
        ({"HOLDFAST_SETTLE": "2", "PET_RDZV_CONF": "last_call_timeout=4"}, "settle_s", 2.0),
        ({"HOLDFAST_STATE_DIR": "/data"}, "state_dir", "/data"),
        ({"HOLDFAST_STATE_DIR": "", "HOLDFAST_SETTLE": ""}, "state_dir", "~/.holdfast"),
        ({"PET_LOGS_SPECS": "read by nobody"}, "logs_specs", None),
    ],
)
def test_values_from_the_environment(environ: dict[str, str], field: str, value: object) -> None:
    assert getattr(parsed("", **environ), field) == value


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:1", "0:3,1:0,2:1,3:2"])
def test_streams_are_read_as_torchrun_reads_them(text: str) -> None:
    assert parsed(f"-r {text}").redirects == Std.from_str(text)


def test_without_home_the_password_file_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_run(["--state-dir", "~/runs", "train.py"], {}).state_dir.endswith("/runs")
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    with pytest.raises(UsageError, match=r"--state-dir ~/runs: this user has no home .* give an absolute path"):
        parse_run(["--state-dir", "~/runs", "train.py"], {})
    assert parse_run(["--state-dir", "/data", "train.py"], {}).state_dir == "/data"
    assert parse_run(["train.py"], {}).state_dir == "~/.holdfast", "what is used then is seen at the start of a job"


@pytest.mark.parametrize(
    "text", ["'a=1,timeout=60'", "a='1',timeout=\"60\"", "\"'a'=1, timeout = 60\"", "a=1,timeout=60"]
)
def test_quotes_that_no_shell_has_removed_do_not_matter_in_rdzv_conf(text: str) -> None:
    options = parse_run([f"--rdzv-conf={text}", "train.py"], HOME)
    assert options.rdzv_conf == {"a": "1", "timeout": "60"}
    assert options.join_timeout_s == 60.0


def test_a_logs_specs_of_another_package_is_refused_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Name: site\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text("[torchrun.logs_specs]\nsite_logs = site.logs:SiteLogs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_logs_specs("default")
    with pytest.raises(UsageError, match=r"--logs-specs site_log: no installed package .* did you mean site_logs\?"):
        check_logs_specs("site_log")
    with pytest.raises(UsageError, match=r"cannot call site\.logs:SiteLogs: say where output goes with --log-dir, -r"):
        check_logs_specs("site_logs")


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        parsed("").nnodes_min = 2  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(parsed("-r 0:1")), type=RunOptions) == parsed("-r 0:1")


# Refusals: the whole sentence, since it is all that the user sees.


REFUSALS = {
    "--nproc-per-noed 2": "unknown flag --nproc-per-noed: did you mean --nproc-per-node?",
    "--nproc_per_nodes=2": "unknown flag --nproc_per_nodes: did you mean --nproc-per-node?",
    "-module": "unknown flag -module: did you mean --module?",
    "-standalone": "unknown flag -standalone: did you mean --standalone?",
    "--learning 3": "unknown flag --learning: holdfast run --help lists the flags; those of the script come after it",
    "--=3": "unknown flag --: holdfast run --help lists the flags; those of the script come after it",
    "--st": "--st is ambiguous: write --standalone or --start-method",
    "--tls-c x": "--tls-c is ambiguous: write --tls-cert or --tls-ca",
    "--nnodes --standalone": "--nnodes needs a value: write --nnodes MIN[:MAX]",
    "--standalone=1": "--standalone takes no value: write --standalone alone, without =1",
    "-m=": "--module takes no value: write --module alone, without =",
    "--max-restarts -1": "--max-restarts -1: give a whole number, 0 or more",
    "--max_restarts=many": "--max-restarts many: give a whole number, 0 or more",
    "--master-port 70000": "--master-port 70000: give a whole number, 0 to 65535",
    "--node-rank -1": "--node-rank -1: give a whole number, 0 or more",
    "--settle -1": "--settle -1: give a time in seconds, 0 or more, as in 2.5",
    "--monitor-interval nan": "--monitor-interval nan: give a time in seconds, 0 or more, as in 2.5",
    "--guard-window inf": "--guard-window inf: give a time in seconds, 0 or more, as in 2.5",
    "--restart-grace soon": "--restart-grace soon: give a time in seconds, 0 or more, as in 2.5",
    "--shutdown-timeout -3": "--shutdown-timeout -3: give a time in seconds, 0 or more, as in 2.5",
    "--heartbeat-interval 0": "--heartbeat-interval 0: give a time in seconds, 0.01 or more",
    "--start-method clone": "--start-method clone: choose spawn, fork or forkserver",
    "--log-format xml": "--log-format xml: choose auto, text or json",
    "--numa-binding core": "--numa-binding core: choose node, socket, exclusive or core-complex",
    "--nnodes 3:2": "--nnodes 3:2: the minimum is larger than the maximum, write 2:3",
    "--nnodes 0": "--nnodes 0: a job has at least one node, give 1 or more",
    "--nnodes 0:2": "--nnodes 0:2: a job has at least one node, give 1 or more",
    "--nnodes two": "--nnodes two: give a number of nodes or MIN:MAX, as in 2 or 1:4",
    "--nnodes 1:2:3": "--nnodes 1:2:3: give a number of nodes or MIN:MAX, as in 2 or 1:4",
    "--nproc-per-node 0": "--nproc-per-node 0: give 1 or more workers, or one of auto, cpu, gpu, xpu",
    "--nproc-per-node -2": "--nproc-per-node -2: give 1 or more workers, or one of auto, cpu, gpu, xpu",
    "--nproc-per-node 1.5": "--nproc-per-node 1.5: give 1 or more workers, or one of auto, cpu, gpu, xpu",
    "--rdzv-backend c10": "--rdzv-backend c10: no such rendezvous backend, did you mean c10d?",
    "--rdzv-backend zookeeper": (
        "--rdzv-backend zookeeper: no such rendezvous backend, choose static, c10d, etcd, etcd-v2 or holdfast"
    ),
    "--rdzv-conf a": ("--rdzv-conf a: give key=value pairs with commas between, as in join_timeout=60,is_host=1"),
    "--rdzv-conf join_timeout=0": "--rdzv-conf join_timeout=0: give a time in seconds above 0",
    "--rdzv-conf last_call_timeout=x": "--rdzv-conf last_call_timeout=x: give a time in seconds, 0 or more, as in 2.5",
    "--rdzv-conf is_host=maybe": "--rdzv-conf is_host=maybe: give 1 or 0",
    "--rdzv-endpoint host:http": (
        "--rdzv-endpoint host:http: the port must be a number from 0 to 65535, as in host:29400 or [::1]:29400"
    ),
    "--rdzv-endpoint host:70000": (
        "--rdzv-endpoint host:70000: the port must be a number from 0 to 65535, as in host:29400 or [::1]:29400"
    ),
    "--rdzv-endpoint ::1": ("--rdzv-endpoint ::1: give HOST:PORT, with an IPv6 address in brackets, as in [::1]:29400"),
    "--rdzv-endpoint a:0 --nnodes 2": (
        "--rdzv-endpoint a:0: the other nodes cannot know which free port is taken, give a port above 0"
    ),
    "--rdzv-backend c10d --nnodes 1:2": (
        "--rdzv-backend c10d needs an address at which up to 2 nodes meet:"
        " give each of them the same --rdzv-endpoint HOST:PORT"
    ),
    "--nnodes 2 --master-port 0": (
        "--master-port 0: the other nodes cannot know which free port is taken, give a port above 0"
    ),
    "--nnodes 2 --master-addr node0:29500": (
        "--master-addr node0:29500: give the host alone, and its port with --master-port"
    ),
    "--nnodes 2 --master-addr ''": "--master-addr : give a host name or an address, as in 10.0.0.1",
    "--rdzv-id ''": "--rdzv-id is empty: give every node of the job the same name, or leave the flag out",
    "--keep-jobs 30": "--keep-jobs 30: give an age as a number with its unit: 30d, 12h, 2w, 90min",
    "--state-dir ''": "--state-dir is empty: name a directory, or leave the flag out",
    "-r 4": "--redirects 4: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:VALUE pairs as in 0:1,1:2",
    "-t 0:1,1": (
        "--tee 0:1,1: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:VALUE pairs as in 0:1,1:2"
    ),
    "--local-ranks-filter 0,-1": "--local-ranks-filter 0,-1: give local ranks with commas between, as in 0,1,2",
    "--local-ranks-filter all": "--local-ranks-filter all: give local ranks with commas between, as in 0,1,2",
    "--signals-to-handle SIGTERN": ("--signals-to-handle SIGTERN: there is no signal 'SIGTERN', did you mean SIGTERM?"),
    "--signals-to-handle ''": ("--signals-to-handle : there is no signal '', give names such as SIGTERM,SIGUSR1"),
    "--signals-to-handle SIGKILL": "--signals-to-handle SIGKILL: no process can handle SIGKILL, leave it out",
    "--preload a-b": ("--preload a-b: give module names with commas between, as in numpy,transformers.models"),
    "--preload none,numpy": (
        "--preload none,numpy: none means that nothing is imported ahead: give it alone, or leave it out"
    ),
    "--node-id ../x": (
        "--node-id ../x: give 1 to 128 letters, digits, dots, dashes, colons or underscores,"
        " with a letter or digit first"
    ),
    "--no-python -m": "--no-python and --module exclude each other: a module needs python, drop one",
    "--standalone --nnodes 1:2": "--standalone is for one node: drop it, or --nnodes 1:2",
    "--node-rank 2 --nnodes 2": (
        "--node-rank 2 does not fit --nnodes 2: ranks of nodes go from 0 to 1, lower the rank or raise --nnodes"
    ),
    "--node-rank 1": (
        "--node-rank 1 does not fit --nnodes 1:1: ranks of nodes go from 0 to 0, lower the rank or raise --nnodes"
    ),
    "--tls-cert a": "--tls-cert a needs its key: add --tls-key FILE",
    "--tls-key a": "--tls-key a needs its certificate: add --tls-cert FILE",
    "--silence-timeout 1": (
        "--silence-timeout 1 would lose healthy nodes between two heartbeats:"
        " make it several times longer than --heartbeat-interval 1.0"
    ),
    "--heartbeat-interval 5": (
        "--silence-timeout 5.0 would lose healthy nodes between two heartbeats:"
        " make it several times longer than --heartbeat-interval 5"
    ),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_work_is_refused_with_one_sentence(words: str) -> None:
    assert refusal(words) == REFUSALS[words]


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"PET_MAX_RESTARTS": "x"}, "PET_MAX_RESTARTS=x: give a whole number, 0 or more"),
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE=yes: set it to 1 or 0, or unset it"),
        ({"PET_START_METHOD": "clone"}, "PET_START_METHOD=clone: choose spawn, fork or forkserver"),
        ({"PET_NNODES": "4:2"}, "PET_NNODES=4:2: the minimum is larger than the maximum, write 2:4"),
        (
            {"PET_STANDALONE": "1", "PET_NNODES": "2"},
            "PET_STANDALONE=1 is for one node: drop it, or PET_NNODES=2",
        ),
        ({"HOLDFAST_TLS_CERT": "a"}, "HOLDFAST_TLS_CERT=a needs its key: add --tls-key FILE"),
        (
            {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"},
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x: give a time in seconds, 0 or more, as in 2.5",
        ),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], sentence: str) -> None:
    assert refusal("", environ) == sentence


@pytest.mark.parametrize("words", ["", "--standalone", "--nnodes 1 --", "''"])
def test_without_a_script(words: str) -> None:
    sentence = "no training script: name it after the flags, as in holdfast run train.py"
    assert refusal(words, script="") == sentence


def test_what_standalone_and_run_path_overrule_is_not_refused() -> None:
    assert parsed("--standalone --rdzv-endpoint a:b --rdzv-id ''").standalone
    assert parsed("--run-path --no-python --module").run_path


# Help, doc, import.


def test_help_is_grouped_and_honest(capsys: pytest.CaptureFixture[str]) -> None:
    # --h is --help with torchrun: --heartbeat-interval must not make it ambiguous, nor a bad variable hide the help.
    for words in (["--help"], ["-h"], ["--h"], ["--standalone", "-h", "train.py"]):
        with pytest.raises(SystemExit) as done:
            build_parser({"PET_STANDALONE": "yes"}).parse_args(words)
        assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for title in ("size", "rendezvous", "launching", "logs", "recovery", "security"):
        assert f" {title}: " in text and GROUPS[title]
    for flag in FLAGS:
        assert flag.name in text and (flag.variable is None or f"[{flag.variable}]" in text)
    for name in ("--event-log-handler", "--monitor-interval"):
        assert re.search(rf"{name} \w+ accepted for compatibility: ", text)


@pytest.mark.parametrize("action", build_parser()._actions, ids=lambda action: action.dest)
def test_the_doc_has_a_row_for_each_flag(action: argparse.Action) -> None:
    flag = next((flag for flag in FLAGS if flag.dest == action.dest), None)
    if flag is None:
        assert action.dest in ("help", "training_script", "training_script_args")
        return
    row = next((line for line in DOC.splitlines() if line.startswith(f"| `{flag.name}`")), "")
    assert f"| `{flag.variable}` |" in row if flag.variable else "| none |" in row
    if flag.is_ours and isinstance(flag.default, float):
        assert f"| {flag.default} s |" in row
    elif flag.is_ours and flag.default:
        assert f"| `{flag.default}` |" in row
    if flag.short:
        assert f"`{flag.short}`" in row


def test_the_doc_has_no_row_for_a_flag_that_is_gone() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)`", DOC, re.MULTILINE)
    assert sorted(rows) == sorted(flag.name for flag in FLAGS)


@pytest.mark.parametrize("line", re.findall(r"^holdfast run (.+)$", DOC, re.MULTILINE))
def test_the_docs_commands_parse(line: str) -> None:
    assert parse_run(shlex.split(line), HOME).script in ("train.py", "my.training")


def test_reading_flags_imports_little() -> None:
    code = "import sys, holdfast.cli.run_flags; print(*{name.split('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "ssl", "structlog", "typer", "rich", "numpy", "asyncio"}.isdisjoint(found)


def test_either_name_of_the_check_asks_for_it() -> None:
    assert parsed("--node-check").node_check and parsed("--network-check").node_check
    assert parsed("", HOLDFAST_NETWORK_CHECK="1").node_check
    assert parsed("--node-check --exclude-straggler").exclude_straggler


def test_stragglers_cannot_be_left_out_without_a_check() -> None:
    assert "add --node-check" in refusal("--exclude-straggler")


def test_the_examples_of_the_help_are_command_lines_that_are_understood() -> None:
    text = build_parser().format_help().replace("\\\n", "")
    examples = re.findall(r"^    holdfast run (.*)$", text, re.MULTILINE)
    assert len(examples) == 5
    for example in examples:
        assert parse_run(shlex.split(example), HOME).script, example
