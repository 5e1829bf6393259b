"""Where the job's master is, by torchrun's rules."""

import shlex
from pathlib import Path

import pytest

from holdfast.cli.run_flags import master_endpoint, parse_run
from support.jobs import Place


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        ("", ("127.0.0.1", 0)),
        ("--standalone", ("127.0.0.1", 0)),
        ("--standalone --rdzv-endpoint host:1 --master-port 2", ("127.0.0.1", 0)),
        ("--master-addr 10.0.0.1", ("127.0.0.1", 0)),
        ("--master-port 29501", ("127.0.0.1", 29501)),
        ("--master-addr localhost --master-port 0", ("127.0.0.1", 0)),
        ("--nnodes 2", ("127.0.0.1", 29500)),
        ("--nnodes 2 --master-addr node0", ("node0", 29500)),
        ("--nnodes 2 --master-addr [::1] --master-port 7", ("::1", 7)),
        ("--nnodes 2 --master-addr fe80::1%eth0 --master-port 7", ("fe80::1%eth0", 7)),
        ("--nnodes 2 --rdzv-endpoint node0:7 --master-port 8", ("node0", 7)),
        ("--nnodes 2 --rdzv-endpoint node0 --master-port 8", ("node0", 29500)),
        ("--rdzv-backend c10d", ("127.0.0.1", 0)),
        ("--rdzv-backend c10d --master-port 8", ("127.0.0.1", 0)),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", ("127.0.0.1", 0)),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --nnodes 1:4", ("127.0.0.1", 0)),
        ("--rdzv-backend c10d --rdzv-endpoint node0 --nnodes 2", ("node0", 29400)),
        ("--rdzv-backend c10d --rdzv-endpoint node0:7 --nnodes 2", ("node0", 7)),
        ("--rdzv-backend c10d --rdzv-endpoint [::1]:7", ("::1", 7)),
        ("--rdzv-backend holdfast --rdzv-endpoint [fe80::1]", ("fe80::1", 29400)),
        ("--rdzv-backend etcd --rdzv-endpoint node0.example.org:7", ("node0.example.org", 7)),
    ],
)
def test_the_masters_address(words: str, endpoint: tuple[str, int]) -> None:
    assert master_endpoint(parse_run([*shlex.split(words), "train.py"], {"HOME": "/home/ada"})) == endpoint


@pytest.mark.usefixtures("leak_guard")
def test_a_range_of_nodes_with_any_free_port_runs_as_one_node(tmp_path: Path) -> None:
    """As under torchrun, which does not say that no other node can join."""
    words = ("--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--no-python", "true")
    agent = Place(tmp_path).start(*words)
    assert agent.wait() == 0, agent.stderr
    assert [text.split(";")[0] for text in agent.logged("port-unknown")] == [
        "localhost:0: other nodes cannot know which free port is taken, so none can join this job"
    ]
