"""Jobs across hosts, and what becomes of them when the network, a host or the lone master fails.

Every host is a network namespace (support/hosts.py). The master is on the first one, where its journal is; workers of
all hosts write into one directory.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast.core.records import (
    GatheringBegan,
    IncidentDecided,
    NodeJoined,
    NodeLost,
    Strategy,
    ViewFormed,
)
from support.clusters import BEAR_SILENCE, GUARD_FOR_LONG, NOTICE_SILENCE, PORT, Cluster, flat
from support.hosts import Host, Network, cut_between, hosts, reset_between, why_not
from support.jobs import SCRIPTS, AgentProcess, wait_for, wait_until_gone

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")


@pytest.fixture
def net(request: pytest.FixtureRequest, leak_guard: str) -> Iterator[Network]:
    """As many hosts as the test says: @pytest.mark.parametrize("net", [3], indirect=True)."""
    with hosts(request.param) as network:
        yield network


two_hosts = pytest.mark.parametrize("net", [2], indirect=True, ids=["2-hosts"])
three_hosts = pytest.mark.parametrize("net", [3], indirect=True, ids=["3-hosts"])
four_hosts = pytest.mark.parametrize("net", [4], indirect=True, ids=["4-hosts"])


# --- without faults


@two_hosts
def test_ddp_trains_across_two_hosts_which_listen_on_their_named_addresses_only(tmp_path: Path, net: Network) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "2", *BEAR_SILENCE)
    agents = job.start_all("ab", program=(str(SCRIPTS / "trains.py"),))
    job.wait_for_view(1, "ab")
    view = job.journal.of(ViewFormed)[0].view
    store_host = net["ab".index(view.store_node_id)]
    assert view.store_host == store_host.address
    assert (store_host.address, view.store_port) in store_host.listeners()
    assert (net[0].address, PORT) in net[0].listeners()
    for host in net:
        assert {address for address, _ in host.listeners()} == {host.address}
    job.assert_finishes(*agents)
    assert {line.rank for line in job.ledger("end")} == {0, 1}
    told = {path.read_text() for path in job.work.glob("store-address-*")}
    assert told == {store_host.address}


@three_hosts
def test_a_lone_master_is_killed_and_resumed_and_no_worker_restarts(tmp_path: Path, net: Network) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "2", *BEAR_SILENCE)
    first = job.start_master()
    agents = [job.start_on(host, name) for host, name in zip(net.hosts[1:], "ab", strict=True)]
    pids = job.wait_for_view(1, "ab")
    first.kill()
    job.wait_for_steps(*flat(pids))
    second = job.start_master("--resume")
    wait_for(lambda: job.journal.term() == 2, what="the second term")
    job.assert_finishes(*agents)
    assert second.wait() == 0
    job.assert_undisturbed(pids)


# --- cuts


@three_hosts
def test_a_node_behind_a_silent_cut_is_lost_and_comes_back_as_a_new_life(tmp_path: Path, net: Network) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "2:3", *NOTICE_SILENCE, *GUARD_FOR_LONG)
    agents = job.start_all("abc")
    first = job.wait_for_view(1, "abc")

    net[2].cut()
    lost = job.journal.wait_for(NodeLost)
    assert (lost.node_id, lost.certain) == ("c", False)
    assert lost.incarnation == job.lives("c")[0]
    second = job.wait_for_view(2, "ab")
    assert not set(flat(first)) & set(flat(second))
    wait_until_gone(*first["a"], *first["b"])
    job.wait_for_steps(*first["c"])  # nobody could tell it yet

    net[2].heal()
    third = job.wait_for_view(3, "abc")
    wait_until_gone(*flat(first), *flat(second))
    assert not set(flat(third)) & {*flat(first), *flat(second)}
    assert len(job.lives("a")) == len(job.lives("b")) == 1
    assert len(set(job.lives("c"))) == 2
    job.assert_finishes(*agents)
    assert len(job.ledger("start")) == 8
    assert [lost.node_id for lost in job.journal.of(NodeLost)] == ["c"]
    assert agents[2].logged("node-rejoining")
    assert job.journal.job().incidents.restarts_used == 0


@pytest.mark.parametrize("deaf", ["master", "agent"])
@three_hosts
def test_a_cut_in_one_direction_is_a_cut(tmp_path: Path, net: Network, deaf: str) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "2:3", *NOTICE_SILENCE, *GUARD_FOR_LONG)
    agents = job.start_all("abc")
    first = job.wait_for_view(1, "abc")
    cut_between(*((net[2], net[0]) if deaf == "master" else (net[0], net[2])))
    assert job.journal.wait_for(NodeLost).node_id == "c"
    job.wait_for_view(2, "ab")
    job.wait_for_steps(*first["c"])
    net[2].heal()
    job.wait_for_view(3, "abc")
    wait_until_gone(*first["c"])
    assert len(set(job.lives("c"))) == 2
    job.assert_finishes(*agents)


@two_hosts
def test_a_cut_shorter_than_the_silence_timeout_changes_nothing(tmp_path: Path, net: Network) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "2", *BEAR_SILENCE)
    agents = job.start_all("ab")
    pids = job.wait_for_view(1, "ab")
    to_master, _ = net[1].cut()
    wait_for(lambda: to_master.packets() >= 2, what="a heartbeat that was lost")
    net[1].heal()
    job.wait_for_steps(*flat(pids))
    job.assert_finishes(*agents)
    job.assert_undisturbed(pids)


@pytest.mark.parametrize("who_hears", ["agent", "master"])
@two_hosts
def test_a_connection_that_is_reset_is_made_again_within_the_grace(
    tmp_path: Path, net: Network, who_hears: str
) -> None:
    """A reset reaches one end only; the other learns of it when it speaks, or when the new connection is there."""
    job = Cluster(tmp_path, net, "--nnodes", "2", *BEAR_SILENCE, "--reconnect-grace", "40")
    agents = job.start_all("ab")
    pids = job.wait_for_view(1, "ab")
    before = net[1].connections_to(net[0].address, PORT)
    ends = (net[1], net[0]) if who_hears == "agent" else (net[0], net[1])
    rule = reset_between(*ends)
    wait_for(rule.packets, what="a packet to answer with a reset")
    net[1].heal()

    def reconnected() -> bool:
        now = net[1].connections_to(net[0].address, PORT)
        return len(now) == 1 and not now & before

    assert len(before) == 1
    wait_for(reconnected, what="another connection to the master")
    job.wait_for_steps(*flat(pids))
    job.assert_finishes(*agents)
    job.assert_undisturbed(pids)


@three_hosts
def test_workers_train_on_while_the_masters_host_is_cut_off_and_the_job_goes_on_afterwards(
    tmp_path: Path, net: Network
) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "3", *NOTICE_SILENCE)
    agents = job.start_all("abc")
    first = job.wait_for_view(1, "abc")

    net[0].cut("cable")
    wait_for(lambda: len(job.journal.of(NodeLost)) == 2, what="both nodes lost")
    wait_until_gone(*first["a"])  # by itself it is too few
    job.wait_for_steps(*first["b"], *first["c"])
    assert all(agent.is_running for agent in agents)
    assert [record.strategy for record in job.journal.of(IncidentDecided)] == [Strategy.WAIT]

    net[0].heal()
    second = job.wait_for_view(2, "abc")
    wait_until_gone(*flat(first))
    assert not set(flat(first)) & set(flat(second))
    assert [len(set(job.lives(name))) for name in "abc"] == [1, 2, 2]
    job.assert_finishes(*agents)
    assert len(job.journal.of(GatheringBegan)) == 2
    assert len(job.ledger("start")) == 6


# --- lives of a node


@four_hosts
def test_the_id_of_a_node_behind_a_cut_is_guarded_for_a_while_and_its_old_life_then_refused(
    tmp_path: Path, net: Network
) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "2:3", *NOTICE_SILENCE, "--guard-window", "4")
    not_yet = reset_between(net[3], net[0])
    successor = job.start_on(net[3], "c")  # knocks, and will be heard at once when the door is open
    agents = job.start_all("abc")
    first = job.wait_for_view(1, "abc")
    wait_for(not_yet.packets, what="the successor")
    net[2].cut()
    job.journal.wait_for(NodeLost)
    net.remove(not_yet)
    wait_for(lambda: successor.logged("join-refused"), what="the guard of the id")
    assert len(job.lives("c")) == 1
    second = job.wait_for_view(2, "ab")
    assert "node c fell silent and may still be alive" in successor.stderr
    assert f"on {net[2].namespace}): retry in " in successor.stderr

    third = job.wait_for_view(3, "abc")
    wait_until_gone(*flat(second))
    assert len(set(job.lives("c"))) == 2
    assert job.journal.of(NodeJoined)[-1].info.address == net[3].address
    job.wait_for_steps(*first["c"])  # it still knows nothing
    net[2].heal()
    assert agents[2].wait() == 4
    assert "node c is alive and connected" in agents[2].stderr
    wait_until_gone(*first["c"])
    assert job.started(3) == third
    job.assert_finishes(agents[0], agents[1], successor)
    assert job.journal.view() == 3


@three_hosts
def test_the_id_of_a_node_whose_agent_was_killed_is_free_at_once(tmp_path: Path, net: Network) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "1:2", *BEAR_SILENCE, *GUARD_FOR_LONG)
    agents = job.start_all("ab")
    first = job.wait_for_view(1, "ab")
    agents[1].kill()
    assert job.journal.wait_for(NodeLost).certain
    wait_until_gone(*first["b"])
    job.wait_for_view(2, "a")
    successor = job.start_on(net[2], "b")
    job.wait_for_view(3, "ab")
    assert not successor.logged("join-refused")
    job.assert_finishes(agents[0], successor)


@pytest.mark.parametrize("how", ["every process killed", "no power"])
@two_hosts
def test_the_job_goes_on_without_a_host_that_died(tmp_path: Path, net: Network, how: str) -> None:
    """Its kernel says goodbye for processes that were killed, but not when the power is gone."""
    power_is_gone = how == "no power"
    silence = NOTICE_SILENCE if power_is_gone else BEAR_SILENCE
    job = Cluster(tmp_path, net, "--nnodes", "1:2", *silence)
    agents = job.start_all("ab")
    first = job.wait_for_view(1, "ab")
    if power_is_gone:
        net[1].cut("cable")
    net[1].kill_all()
    lost = job.journal.wait_for(NodeLost)
    assert (lost.node_id, lost.certain) == ("b", not power_is_gone)
    second = job.wait_for_view(2, "a")
    wait_until_gone(*flat(first))
    job.assert_finishes(agents[0])
    assert agents[1].wait() == -9
    assert {line.pid for line in job.ledger("end")} == set(flat(second))
    assert [decided.counted for decided in job.journal.of(IncidentDecided)] == [False]


# --- strangers


@three_hosts
def test_a_stranger_at_the_address_of_a_dead_master_does_not_end_anything(tmp_path: Path, net: Network) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "2", *BEAR_SILENCE)
    master = job.start_master()
    agents = [job.start_on(host, name) for host, name in zip(net.hosts[1:], "ab", strict=True)]
    pids = job.wait_for_view(1, "ab")
    master.kill()
    stranger = job.start_master(token="the token of quite another job", job_id="other")
    for host in net.hosts[1:]:
        wait_for(partial(has_turned_away, stranger, host.address), what="an agent turned away")
    stranger.kill()
    job.wait_for_steps(*flat(pids))
    assert all(agent.is_running for agent in agents)
    master = job.start_master("--resume")
    job.assert_finishes(*agents, master)
    job.assert_undisturbed(pids)


@three_hosts
def test_a_host_without_the_right_token_is_turned_away_and_the_job_does_not_notice(
    tmp_path: Path, net: Network
) -> None:
    job = Cluster(tmp_path, net, "--nnodes", "1:3", *BEAR_SILENCE, "--settle", "0.5")
    agents = [job.start_on(net[0], "a")]
    pids = job.wait_for_view(1, "a")
    wrong = job.start_on(net[1], "b", token="another token, long enough to be one")
    assert wrong.wait() == 4
    assert "does not know the job's token: give the same HOLDFAST_TOKEN or --token-file on every node" in wrong.stderr
    wait_for(lambda: f"turned {net[1].address}:" in agents[0].stderr, what="a line in the master's log")
    none = job.start_on(net[2], "c", token="")
    assert none.wait() == 2
    assert "the master's address is not loopback, so the job needs a token" in none.stderr
    job.wait_for_steps(*flat(pids))
    job.assert_finishes(*agents)
    job.assert_undisturbed(pids)
    assert {record.node_id for record in job.journal.of(NodeJoined)} == {"a"}


def has_turned_away(master: AgentProcess, address: str) -> bool:
    return f"turned {address}:" in master.stderr


def test_a_master_that_others_can_reach_is_not_started_without_a_token(tmp_path: Path) -> None:
    with hosts(1) as net:
        job = Cluster(tmp_path, net, "--nnodes", "1:2")
        agent = job.start_on(net[0], "a", token="")
        assert agent.wait() == 2
        assert "the master's address is not loopback, so the job needs a token" in agent.stderr
        assert job.journal.path is None


@three_hosts
def test_with_mutual_tls_only_certificates_of_the_jobs_authority_are_let_in(tmp_path: Path, net: Network) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    job = Cluster(tmp_path, net, "--nnodes", "2:3", *BEAR_SILENCE, "--settle", "0.5", "--tls-ca", str(ours.certificate))
    agents = [job.start_on(host, name, *ours.flags_for(host)) for host, name in zip(net.hosts[:2], "ab", strict=True)]
    pids = job.wait_for_view(1, "ab")
    stranger = job.start_on(net[2], "c", *theirs.flags_for(net[2]), "--rdzv-conf", "join_timeout=1")
    assert stranger.wait() == 5
    assert "was unreachable for" in stranger.stderr
    job.wait_for_steps(*flat(pids))
    job.assert_finishes(*agents)
    job.assert_undisturbed(pids)
    assert {record.node_id for record in job.journal.of(NodeJoined)} == {"a", "b"}


class Authority:
    """A certificate authority, and the certificates it gives to hosts."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority {directory.name}")])
        self.certificate = directory / "ca.pem"
        basic = x509.BasicConstraints(ca=True, path_length=None)
        self._write(self.certificate, self._sign(self._name, self._key, basic))

    def flags_for(self, host: Host) -> tuple[str, ...]:
        """A certificate for the host's address, as flags."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host.namespace)])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host.address))])
        certificate_path, key_path = (self._directory / f"{host.namespace}.{kind}" for kind in ("pem", "key"))
        self._write(certificate_path, self._sign(name, key, address))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key_path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        return ("--tls-cert", str(certificate_path), "--tls-key", str(key_path))

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
        return builder.add_extension(extension, critical=False).sign(self._key, hashes.SHA256())

    def _write(self, path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
