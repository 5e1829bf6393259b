"""Where the job's master is, by torchrun's rules."""

import shlex

import pytest

from holdfast.cli.run_flags import master_endpoint, parse_run


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
        ("--rdzv-backend c10d --rdzv-endpoint node0 --nnodes 2", ("node0", 29400)),
        ("--rdzv-backend c10d --rdzv-endpoint node0:7 --nnodes 2", ("node0", 7)),
        ("--rdzv-backend c10d --rdzv-endpoint [::1]:7", ("::1", 7)),
        ("--rdzv-backend holdfast --rdzv-endpoint [fe80::1]", ("fe80::1", 29400)),
        ("--rdzv-backend etcd --rdzv-endpoint node0.example.org:7", ("node0.example.org", 7)),
    ],
)
def test_the_masters_address(words: str, endpoint: tuple[str, int]) -> None:
    assert master_endpoint(parse_run([*shlex.split(words), "train.py"], {"HOME": "/home/ada"})) == endpoint
