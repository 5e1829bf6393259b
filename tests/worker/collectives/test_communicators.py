"""NCCL without a GPU: the names that are used are torch's, and a communicator that is connecting can be freed.

ProcessGroupNCCL is not in a wheel for the CPU. Its names are read in the wheel's own declarations, and a make-believe
class of the same names is run in its place.
"""

from __future__ import annotations

import ast
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ErrorType, PrefixStore

from holdfast.errors import TorchVersionError, ViewOverError
from holdfast.worker.collectives import communicators, elastic_group, groups
from holdfast.worker.collectives import view_connections as realms
from holdfast.worker.collectives.communicators import Nccl, error_by_torch
from holdfast.worker.collectives.elastic_group import ElasticGroup
from holdfast.worker.collectives.reconnect_groups import UsedGroup, connect_groups, wanted
from holdfast.worker.collectives.view_connections import ViewConnections
from support.crowd import Member, together

TIMEOUT = timedelta(seconds=30)
WAIT_S = 20.0
TORCH = Path(torch.__file__).parent


# --- the names


def declared(name: str) -> set[str]:
    """Members of a class in torch's declarations, those of its bases included; of an inner class by `Outer.Inner`."""
    tree: Any = ast.parse((TORCH / "_C" / "_distributed_c10d.pyi").read_text())
    bases: list[str] = []
    for part in name.split("."):
        tree = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == part)
        bases = [ast.unparse(base) for base in tree.bases]
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
    found |= {ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    return found.union(*(declared(base) for base in bases if base != "Enum"))


@pytest.mark.parametrize(
    ("name", "members"),
    [
        (
            "ProcessGroupNCCL",
            {"Options", *Nccl.NAMES} - {"_start_coalescing", "_end_coalescing"},
        ),
        ("ProcessGroupNCCL.Options", {"config", "_timeout", "group_name", "global_ranks_in_group"}),
        ("ProcessGroupNCCL.NCCLConfig", {"blocking"}),
    ],
)
def test_the_names_that_are_used_are_torchs(name: str, members: set[str]) -> None:
    assert members <= declared(name)


def test_what_torch_binds_for_every_backend_is_there_in_this_wheel() -> None:
    """Its declarations say more than its classes have: `get_error` is bound for NCCL alone."""
    of_nccl = {"get_error"}
    assert {name for name in Nccl.NAMES if not hasattr(_distributed_c10d.Backend, name)} == of_nccl


def test_a_torch_that_lacks_a_name_is_refused_before_it_is_needed(
    connections: ViewConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Made, "get_error")
    with pytest.raises(TorchVersionError, match=r"NCCL in a session \(get_error"):
        connections.make("default", "cuda", 0, 2, TIMEOUT, (0, 1))
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    assert Nccl.lacking() == ["ProcessGroupNCCL"]


def test_the_errors_that_are_asked_for_are_torchs() -> None:
    assert {"SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"} <= set(ErrorType.__members__)


# --- a make-believe one


class Made:
    """What a ProcessGroupNCCL does: rank 0 says where it is in the store, the others wait for that. Who uses it first
    waits until all have begun to connect, and has a lock meanwhile that `abort` needs too."""

    goes_on: threading.Event | None = None
    """What connecting waits for after it has found rank 0."""
    all_begin = True
    """Whether the other members begin to connect too."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self._timeout: timedelta | None = None
            self.group_name = ""
            self.global_ranks_in_group: list[int] = []

    def __init__(self, store: PrefixStore, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.is_aborted, self.connected_to = threading.Event(), ""
        self.error = ErrorType.SUCCESS
        self.has_id, self.aborts, self.lock = threading.Event(), 0, threading.Lock()
        all_made.append(self)

    supports_coalescing = True

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _start_coalescing(self) -> None:
        raise NotImplementedError

    def _end_coalescing(self) -> None:
        raise NotImplementedError

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.rank == 0:
            self.store.set("ncclUniqueId", "here")
        self.store.get("ncclUniqueId")
        if self.goes_on is not None:
            self.has_id.set()
            assert self.goes_on.wait(WAIT_S)
        for other in range(self.size) if self.all_begin else ():
            self.store.underlying_store.set(f"begun/{other}", "1")  # as Holdfast there does

    def allreduce(self, tensors: list[torch.Tensor]) -> SimpleNamespace:
        with self.lock:
            if not self.all_begin:
                time.sleep(WAIT_S)
            self.connected_to = str(tensors[0].device)
        return SimpleNamespace(wait=lambda: True)

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        with self.lock:
            self.aborts += 1
            self.is_aborted.set()

    def shutdown(self) -> None:
        raise NotImplementedError


all_made: list[Made] = []


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> ViewConnections:
    all_made.clear()
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", Made, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Made, raising=False)
    monkeypatch.setattr(communicators, "available", lambda: {"cuda": Nccl})
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(communicators, "first_tensor", lambda device: SimpleNamespace(device=device))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=TIMEOUT)
    made = ViewConnections(7, client, 1, 2)
    made.server = server  # type: ignore[attr-defined]  # kept as long as the client
    return made


def test_a_communicator_connects_when_it_is_made_on_the_callers_device_and_does_not_block(
    connections: ViewConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realms, "ERROR_POLL_S", 60.0)
    inner = connections.make("shard", "cuda", 0, 2, TIMEOUT, (4, 5))
    assert inner is all_made[0] and inner.connected_to == "cuda:3"
    assert inner.options.config.blocking == 0 and inner.options._timeout == TIMEOUT
    assert inner.options.global_ranks_in_group == [4, 5] and inner.options.group_name == "shard/view/7"
    connections.check_communicators()
    inner.error = ErrorType.REMOTE_ERROR
    with pytest.raises(dist.DistBackendError, match="REMOTE_ERROR"):
        connections.check_communicators()
    connections.end("a peer died")
    assert inner.is_aborted.wait(WAIT_S)


def test_one_that_is_still_connecting_is_freed(connections: ViewConnections) -> None:
    """Rank 1 waits for a rank 0 that never comes: a second fault in the middle of a recovery."""
    threading.Timer(0.3, connections.end, ["a second fault"]).start()
    began_at = time.monotonic()
    with pytest.raises(ViewOverError, match="a second fault"):
        connections.make("default", "cuda", 1, 2, TIMEOUT, (0, 1))
    assert time.monotonic() - began_at < WAIT_S / 2
    assert all_made[0].is_aborted.wait(WAIT_S), "the half-made communicator is aborted too"
    assert not all_made[0].connected_to


def test_one_that_waits_for_a_member_which_died_before_it_began_is_freed_at_once(
    connections: ViewConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's abort waits for a lock that the first use has until all are connected: so there is no use before that."""
    monkeypatch.setattr(Made, "all_begin", False)
    threading.Timer(0.3, connections.end, ["a second fault"]).start()
    with pytest.raises(ViewOverError, match="a second fault"):
        connections.make("default", "cuda", 0, 2, TIMEOUT, (0, 1))
    began_at = time.monotonic()
    connections.wait_until_freed()
    assert all_made[0].is_aborted.is_set() and time.monotonic() - began_at < WAIT_S / 2
    assert not all_made[0].connected_to


def test_what_begins_after_the_end_of_its_view_is_not_kept(connections: ViewConnections) -> None:
    connections.end("over")
    with pytest.raises(ViewOverError):
        connections.make("default", "cuda", 0, 2, TIMEOUT, (0, 1))
    assert not all_made


def eventually(condition: Any) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def test_an_error_that_only_the_communicator_knows_of_ends_the_view(connections: ViewConnections) -> None:
    """A link is broken and nobody has died: the main thread hangs on the device, and cannot ask."""
    fine = connections.make("world", "cuda", 0, 2, TIMEOUT, (0, 1))
    broken = connections.make("shard", "cuda", 0, 2, TIMEOUT, (0, 1))
    broken.error = ErrorType.REMOTE_ERROR
    assert fine.is_aborted.wait(WAIT_S) and broken.is_aborted.wait(WAIT_S)
    with pytest.raises(ViewOverError, match="REMOTE_ERROR"):
        connections.check()
    assert connections._asker is not None
    connections._asker.join(WAIT_S)
    assert not connections._asker.is_alive()


def test_nobody_asks_the_communicators_of_a_view_that_was_left_by_plan(connections: ViewConnections) -> None:
    connections.make("world", "cuda", 0, 2, TIMEOUT, (0, 1))
    assert connections._asker is not None and connections._asker.is_alive()
    connections.retire().join(WAIT_S)
    connections._asker.join(WAIT_S)
    assert not connections._asker.is_alive()


def test_a_backend_that_knows_no_errors_has_none() -> None:
    class Unable:
        def get_error(self) -> None:
            raise RuntimeError("Backend xccl does not support getError")

    class Failing:
        def get_error(self) -> None:
            raise RuntimeError("CUDA error: misaligned address")

    assert error_by_torch(object()) == "" and error_by_torch(Unable()) == ""
    with pytest.raises(RuntimeError, match="misaligned"):
        error_by_torch(Failing())


def test_one_that_was_aborted_before_there_was_anything_to_abort_is_aborted_again(
    connections: ViewConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the answer of the store and ncclCommInitRank torch's abort() finds no communicator."""
    monkeypatch.setattr(Made, "goes_on", threading.Event())
    failed: list[BaseException] = []

    def want() -> None:
        try:
            connections.make("default", "cuda", 0, 2, TIMEOUT, (0, 1))
        except ViewOverError as error:
            failed.append(error)

    wanting = threading.Thread(target=want)
    wanting.start()
    assert eventually(lambda: all_made and all_made[0].has_id.is_set())
    connections.end("a second fault")
    wanting.join(WAIT_S)
    assert failed and eventually(lambda: all_made[0].aborts == 1)
    assert Made.goes_on is not None
    Made.goes_on.set()
    assert eventually(lambda: all_made[0].aborts == 2)


def test_making_one_has_a_deadline_of_its_own(connections: ViewConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library does with its own."""
    monkeypatch.setattr(realms, "MAKE_MARGIN_S", 0.1)
    monkeypatch.setattr(Made, "goes_on", threading.Event())
    with pytest.raises(TimeoutError, match="group shard was not connected on cuda within"):
        connections.make("shard", "cuda", 0, 2, timedelta(seconds=0.2), (0, 1))
    connections.end("over")
    assert all_made[0].is_aborted.wait(WAIT_S), "it is known, and freed with the others"
    assert Made.goes_on is not None
    Made.goes_on.set()


# --- connecting again in a new view


def test_what_one_member_has_used_and_all_have_is_connected_in_one_order() -> None:
    world, pair = (0, 1, 2), (0, 2)
    used, new = ("cuda",), ()
    told = [
        [
            UsedGroup("default", world, used),
            UsedGroup("b", pair, used),
            UsedGroup("a", pair, new),
            UsedGroup("gone", pair, used),
        ],
        [UsedGroup("default", world, used)],
        [
            UsedGroup("a", pair, used),
            UsedGroup("b", pair, new),
            UsedGroup("default", world, new),
        ],  # a newcomer at rank 2
    ]
    assert wanted(told) == [("a", pair, "cuda"), ("b", pair, "cuda"), ("default", world, "cuda")]
    assert wanted([[UsedGroup("default", world, used)]]) == [], "its members are not of this view"
    assert wanted([[UsedGroup("default", (0,), new)]]) == []


def test_a_newcomer_connects_the_groups_that_the_others_have_used(connections: ViewConnections) -> None:
    """Rank 1 is new: its groups are there, and were never connected."""
    other = ViewConnections(7, connections.server, 0, 2)  # type: ignore[attr-defined]
    veterans = [ElasticGroup((0, 1), 0, TIMEOUT, name) for name in ("world", "shard", "never used")]
    newcomers = [ElasticGroup((0, 1), 1, TIMEOUT, name) for name in ("never used", "shard", "world")]
    for group in veterans[:2]:
        group.devices_used.add("cuda")
    thread = threading.Thread(target=connect_groups, args=(other, veterans, TIMEOUT), daemon=True)
    thread.start()
    found = connect_groups(connections, newcomers, TIMEOUT)
    thread.join(WAIT_S)
    assert found == [("shard", (0, 1), "cuda"), ("world", (0, 1), "cuda")]
    assert sorted((made.options.group_name, made.rank, made.connected_to) for made in all_made) == [
        (f"{name}/view/7", rank, "cuda:3") for name in ("shard", "world") for rank in (0, 1)
    ]
    assert newcomers[1].devices_used == {"cuda"}


def test_who_waits_for_the_others_groups_is_freed_by_the_end_of_the_view(connections: ViewConnections) -> None:
    assert connections.store is not None
    connections.mesh.add_store(realms.store_addresses(connections.store))
    threading.Timer(0.2, connections.end, ["a second fault"]).start()
    with pytest.raises(ViewOverError, match="a second fault"):
        connect_groups(connections, [], TIMEOUT)


# --- several operations at once


class AtOnce:
    """A device's library that is told several operations, to be begun together. `meta` is torch's device without
    memory."""

    supports_coalescing = True

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.breaks = False

    def _start_coalescing(self) -> None:
        self.notes.append("start")

    def _end_coalescing(self) -> SimpleNamespace:
        self.notes.append("end")
        return SimpleNamespace(wait=lambda: True)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> SimpleNamespace:
        self.notes.append(f"send to {to}")
        return SimpleNamespace(wait=lambda: True)

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> SimpleNamespace:
        if self.breaks:
            raise ViewOverError("a peer died")
        self.notes.append(f"receive from {of}")
        return SimpleNamespace(wait=lambda: True)

    def _allgather_base(self, output: torch.Tensor, value: torch.Tensor, *options: Any) -> None:
        self.notes.append("gather")


def tell_at_once(member: Member, rank: int, size: int) -> list[str]:
    notes: list[str] = []
    member.start(rank, size)
    inner = AtOnce(notes)
    groups.default_group()._inners["meta"] = inner
    tensor, peer = torch.zeros(2, device="meta"), 1 - rank
    transfers = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, tensor, peer)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    with dist.distributed_c10d._coalescing_manager():  # not asynchronous: there are no works
        for _ in range(2):
            dist.all_gather_into_tensor(torch.zeros(4, device="meta"), tensor)
    inner.breaks = True
    groups.agree([rank])  # both are here
    groups.on_stuck(notes.append)
    with pytest.raises(ViewOverError):
        dist.batch_isend_irecv(transfers)
    groups.revoke("a peer died", view=1)
    member.switch(rank, size, 2)
    return notes


def test_transfers_of_a_batch_are_told_together_and_a_batch_that_broke_ends_the_process() -> None:
    """NCCL would wait in the first of two transfers for good, and begins nothing before the end of a batch."""
    found = together(tell_at_once, 2)
    for rank, notes in enumerate(found):
        batch = ["start", f"send to {1 - rank}", f"receive from {1 - rank}", "end"]
        assert notes[:-1] == [*batch, "gather", "gather", *batch[:2]]
        assert "while operations on meta were being told" in notes[-1]


# --- many ranks, and full devices


@pytest.mark.parametrize(("size", "limit_s"), [(2, 20.0), (500, 20.0), (1_000, 30.0), (4_096, 91.92)])
def test_the_time_to_connect_grows_with_the_number_of_ranks(size: int, limit_s: float) -> None:
    assert communicators.connect_timeout(size).total_seconds() == pytest.approx(limit_s)


def test_a_communicator_of_a_view_that_ended_well_gives_its_memory_back() -> None:
    done: list[str] = []
    well, broken = (
        SimpleNamespace(abort=lambda: done.append("abort"), shutdown=lambda: done.append("shutdown")) for _ in range(2)
    )
    nccl = Nccl()
    nccl.drop(well)
    assert done == ["shutdown"]
    nccl.free(broken)
    nccl.drop(broken)
    assert done == ["shutdown", "abort"], "what was aborted is gone already"


def test_the_old_communicators_go_before_the_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may have no room for both."""
    order: list[str] = []
    may_go = threading.Event()

    def retire() -> None:
        may_go.wait(WAIT_S)
        order.append("gone")

    monkeypatch.setattr(groups, "connect_groups", lambda *_: order.append("connected"))
    monkeypatch.setattr(elastic_group.state, "connections", ViewConnections(1, None, 0, 1))
    retiring = threading.Thread(target=retire)
    monkeypatch.setattr(elastic_group.state, "retiring", retiring)
    retiring.start()
    connecting = threading.Thread(target=groups.reconnect, args=(TIMEOUT,))
    connecting.start()
    connecting.join(0.1)
    assert order == [] and connecting.is_alive()
    may_go.set()
    connecting.join(WAIT_S)
    assert order == ["gone", "connected"]
