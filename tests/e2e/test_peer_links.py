"""Links between two nodes that break or lose packets while both nodes reach the master: no process is dead, and the
rank that seems to hang is healthy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.test_canonical import SLOTS, STEPS, CanonicalRun, assert_same_history
from holdfast.core.records import IncidentDecided, PeerLinkSlowedRecord, ViewFormed, WorkersStartedRecord
from holdfast.core.strategies import Strategy
from support.clusters import BEAR_SILENCE, Cluster
from support.hosts import LINK, Network, cut_between, hosts, lose_between, why_not
from support.jobs import SCRIPTS, kill9, wait_for

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")
PROGRAM = (str(SCRIPTS / "canonical.py"), str(STEPS), str(SLOTS), "--pause", "0.05")


@pytest.fixture
def net(leak_guard: str) -> Iterator[Network]:
    with hosts(3) as network:
        yield network


@pytest.mark.parametrize("is_both_ways", [True, pytest.param(False, marks=pytest.mark.long)])
def test_one_end_of_a_silent_link_is_left_out_and_the_others_go_on(
    tmp_path: Path, net: Network, is_both_ways: bool
) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "1:3", "--hang-timeout", "2", *BEAR_SILENCE)
    agents = job.start_all("abc", program=PROGRAM)
    run = CanonicalRun(tmp_path)
    job.journal.wait_for(ViewFormed, lambda formed: len(formed.view.members) == 3)
    run.wait_for_step(20)
    cut_between(net[1], net[2])
    if is_both_ways:
        cut_between(net[2], net[1])
    smaller = job.journal.wait_for(ViewFormed, lambda formed: len(formed.view.members) == 2).view
    left_out = ({"b", "c"} - {member.node_id for member in smaller.members}).pop()
    wait_for(lambda: any(line.view == smaller.number for line in run.ledger), what="a step without the broken link")
    run.hurry()
    for agent, name in zip(agents, "abc", strict=True):
        assert agent.wait() == 0 or name == left_out, agent.stderr[-3000:]
    assert_same_history(run)
    assert {decided.strategy for decided in job.journal.of(IncidentDecided)} == {Strategy.ELASTIC_TRAINING}
    started = [record.pids for record in job.journal.of(WorkersStartedRecord) if record.node_id not in ("", left_out)]
    assert len(set(started)) == 2, "the workers of the other two were never replaced"


@pytest.mark.long
def test_a_link_that_breaks_in_a_recovery_is_found_before_the_recovery_is_given_up(
    tmp_path: Path, net: Network
) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "1:3", *BEAR_SILENCE)
    agents = job.start_all("abc", program=PROGRAM)
    run = CanonicalRun(tmp_path)
    job.journal.wait_for(ViewFormed, lambda formed: len(formed.view.members) == 3)
    run.wait_for_step(20)
    (pid,) = next(record.pids for record in job.journal.of(WorkersStartedRecord) if record.node_id == "b")
    cut_between(net[1], net[2])
    cut_between(net[2], net[1])
    kill9(pid)
    smaller = job.journal.wait_for(ViewFormed, lambda formed: len(formed.view.members) == 2).view
    left_out = ({"b", "c"} - {member.node_id for member in smaller.members}).pop()
    wait_for(lambda: any(line.view == smaller.number for line in run.ledger), what="a step without the broken link")
    run.hurry()
    for agent, name in zip(agents, "abc", strict=True):
        assert agent.wait() == 0 or name == left_out, agent.stderr[-3000:]
    assert_same_history(run)
    strategies = [decided.strategy for decided in job.journal.of(IncidentDecided)]
    assert strategies == [Strategy.RECOVER_IN_PLACE, Strategy.ELASTIC_TRAINING], "the recovery was not tried again"


@pytest.mark.long
@pytest.mark.parametrize("how", ["loses packets", "has a hundredth of its bandwidth"])
def test_a_slow_link_is_named_and_the_job_goes_on(tmp_path: Path, net: Network, how: str) -> None:
    for host in net:  # packets as large as on a wire: else a transfer is one packet, which is lost or is not
        host.run("ip", "link", "set", "dev", LINK, "gso_max_segs", "1")
    flags = ("--nnodes", "3", "--straggler-interval", "0.5", "--hang-timeout", "0", *BEAR_SILENCE)
    job = Cluster(tmp_path, net, *flags)
    agents = job.start_all("abc", program=(*PROGRAM, "--until-hurry"))
    run = CanonicalRun(tmp_path)
    job.journal.wait_for(ViewFormed, lambda formed: len(formed.view.members) == 3)
    run.wait_for_step(20)
    if how == "loses packets":
        lose_between(net[1], net[2], 0.2)
    else:
        shape = ("rate", "2mbit", "burst", "4kb", "latency", "2s")
        net[2].run("tc", "qdisc", "add", "dev", LINK, "root", "tbf", *shape)
    slow = job.journal.wait_for(PeerLinkSlowedRecord, lambda found: True)
    assert "c" in (slow.node_id, slow.peer), "one end of it"
    assert how != "loses packets" or {slow.node_id, slow.peer} == {"b", "c"}
    for host in net:
        host.heal()
    if how != "loses packets":
        net[2].run("tc", "qdisc", "del", "dev", LINK, "root")
    run.hurry()
    assert [agent.wait() for agent in agents] == [0, 0, 0], agents[0].stderr[-3000:]
    assert_same_history(run)
