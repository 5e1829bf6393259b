"""A tree of small groups, through which the ranks of a large view agree: no rank is connected with all others.

    level 1         0                64               128       …    the leaders of the groups of level 0
                    │                │                │
    level 0    0 1 2 … 63     64 65 … 127     128 129 …              all ranks, in groups of neighbours

What ranks say is gathered in each group by its first rank, which says it in the next level's group, up to the root;
what the root concludes is broadcast the same way down. So what a rank has got was concluded from what every rank has
said, as in one group of all: who passes a commit's barrier knows that all had come to it. Who dies on the way leaves
some ranks with the answer and others without, as one that dies in the ring of a flat group does, and that is settled in
the same way: what a rank has begun to apply is committed, and the others roll forward (resume_point.py).

Each group is a communicator of the view (view_connections.py): when the view ends all of them are freed, whichever of
them the end was noticed in. Every rank waits for at most the time-out from the moment it came.

The view's default group is connected on the CPU when a collective first needs it, which the session's own exchanges do
not. Two ranks that send to each other have a connection of their own (`Pair`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, GatherOptions

from holdfast.errors import HoldfastError
from holdfast.torch_compat import Work
from holdfast.worker.collectives.view_connections import ViewConnections
from holdfast.worker.collectives.waits import waits

FLAT_RANKS_MAX = 500
"""Up to here all ranks are one group, each connected with each."""
FAN_MAX = 64
"""The most ranks of a group of the tree."""


class TreeLevel(NamedTuple):
    """The group of one level that a rank is a member of."""

    number: int
    """Which group of the level it is."""
    ranks: tuple[int, ...]
    place: int
    """Of the rank, in `ranks`; 0 leads."""


def fan_of(size: int, fan_max: int) -> int:
    """Return how many members a group has, for the fewest levels that groups of at most `fan_max` can do with."""
    levels = 1
    while fan_max**levels < size:
        levels += 1
    fan = 2
    while fan**levels < size:
        fan += 1
    return fan


def levels_of(rank: int, size: int, fan: int) -> list[TreeLevel]:
    """Return the groups that a rank is a member of, from level 0 up to where it does not lead."""
    found: list[TreeLevel] = []
    span = 1  # the distance of two members of a level
    while span < size:
        number = rank // (span * fan)
        first = number * span * fan
        ranks = tuple(range(first, min(first + span * fan, size), span))
        found.append(TreeLevel(number, ranks, ranks.index(rank)))
        if rank != first:
            break
        span *= fan
    return found


class AgreementTree:
    """The groups of this rank, connected; made when the view begins, by all of its ranks together."""

    def __init__(self, connections: ViewConnections, timeout: timedelta) -> None:
        """Connect; returns when all ranks have come."""
        self._connections, self.timeout = connections, timeout
        self._size = connections.world_size
        self._fan = fan_of(self._size, FAN_MAX)
        self._levels = levels_of(connections.rank, self._size, self._fan)
        self._inners: list[Any] = []
        for height, level in enumerate(self._levels):
            name = f"agreement/{height}/{level.number}"
            made = connections.make(name, "cpu", level.place, len(level.ranks), timeout, level.ranks)
            self._inners.append(made)
        del made  # a traceback would keep it, with its sockets
        self._lock = threading.Lock()
        self._pairs: dict[int, Pair] = {}
        self.agree([0])

    def agree(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        answer = self._exchange(torch.tensor(list(values), dtype=torch.int64, device="cpu"), len(values), highest)
        return cast(list[int], answer.tolist())

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's values, by rank."""
        own = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        rows = self._exchange(own, self._size * len(values), self._side_by_side)
        return cast(list[list[int]], rows.view(self._size, -1).tolist())

    def transfer(self, method: str, tensors: list[Tensor], other: int, tag: int) -> Work:
        """Begin to send to another rank, or to receive from it, without waiting for it to do the same."""
        rank = self._connections.rank
        if other == rank or not 0 <= other < self._size:
            raise HoldfastError(f"rank {rank} of {self._size} cannot communicate with rank {other}")
        with self._lock:
            if other not in self._pairs:
                self._pairs[other] = Pair(self._connections, other, self.timeout)
        return self._pairs[other].begin(method, tensors, tag)

    def _exchange(self, said: Tensor, answer_length: int, conclude: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return what the root concludes from what all ranks say. `conclude` makes of what the members of a group
        say what their leader says for them, of the same length for each group of a level."""
        self._connections.check()
        deadline = time.monotonic() + self.timeout.total_seconds()
        for height in range(len(self._levels)):
            heard = self._gather(height, said, deadline)
            if heard:
                said = conclude(heard)
        answer = torch.zeros(answer_length, dtype=torch.int64, device="cpu")
        if self._connections.rank == 0:
            answer.copy_(said[:answer_length])
        for height in reversed(range(len(self._levels))):
            self._broadcast(height, answer, deadline)
        self._connections.check()
        return answer

    def _gather(self, height: int, said: Tensor, deadline: float) -> list[Tensor]:
        """Return what each member of a group says, to its leader."""
        heard = [torch.zeros_like(said) for _ in self._levels[height].ranks] if self._levels[height].place == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        options.timeout = time_until(deadline)
        self._inners[height].gather([heard] if heard else [], [said], options).wait()
        return heard

    def _broadcast(self, height: int, answer: Tensor, deadline: float) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = time_until(deadline)
        self._inners[height].broadcast([answer], options).wait()

    def _side_by_side(self, heard: list[Tensor]) -> Tensor:
        """Return the members' rows one after another; the last group of a level may have fewer, and gets zeros."""
        together = torch.cat(heard)
        missing = self._fan - len(heard)
        return torch.cat([together, together.new_zeros(missing * heard[0].numel())])


def highest(heard: list[Tensor]) -> Tensor:
    return torch.stack(heard).amax(0)


def time_until(deadline: float) -> timedelta:
    """Return the time that is left, at least a moment: gloo takes none for its own time-out."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


class Pair:
    """A connection with one other rank, made when something is first sent through it. Who sends does not wait until it
    is there: the other may be about to send something itself."""

    def __init__(self, connections: ViewConnections, other: int, timeout: timedelta) -> None:
        self._connections, self._timeout = connections, timeout
        self._ranks = (min(connections.rank, other), max(connections.rank, other))
        self._place = self._ranks.index(connections.rank)
        self._lock = threading.Lock()
        self._inner: Any = None
        self._error: BaseException | None = None
        self._waiting: list[tuple[Future[Work], str, list[Tensor], int]] = []
        threading.Thread(target=self._connect, name=f"holdfast-pair-{other}", daemon=True).start()

    def begin(self, method: str, tensors: list[Tensor], tag: int) -> Work:
        """Begin a transfer, after those that were begun before."""
        begun: Future[Work] = Future()
        with self._lock:
            if self._inner is None and self._error is None:
                self._waiting.append((begun, method, tensors, tag))
            else:
                self._tell(begun, method, tensors, tag)
        return PairWork(begun)

    def _connect(self) -> None:
        inner, error = None, None
        try:
            name = "pair/{}-{}".format(*self._ranks)
            inner = self._connections.make(name, "cpu", self._place, 2, self._timeout, self._ranks)
        except BaseException as raised:  # for those who wait
            error = raised.with_traceback(None)
        with self._lock:
            self._inner, self._error = inner, error
            for transfer in self._waiting:
                self._tell(*transfer)
            self._waiting.clear()

    def _tell(self, begun: Future[Work], method: str, tensors: list[Tensor], tag: int) -> None:
        """With the lock held."""
        if self._error is not None:
            begun.set_exception(self._error)
            return
        try:
            begun.set_result(getattr(self._inner, method)(tensors, 1 - self._place, tag))
        except Exception as error:  # gloo's own: a connection that is broken already
            begun.set_exception(error.with_traceback(None))


class PairWork(Work):
    """A transfer whose connection may not be there yet."""

    def __init__(self, begun: Future[Work]) -> None:
        super().__init__()
        self._begun = begun

    def wait(self, *timeout: Any) -> bool:
        with waits:
            return self._begun.result().wait(*timeout)

    def is_completed(self) -> bool:
        return self._begun.done() and (self._begun.exception() is not None or self._begun.result().is_completed())

    def get_future(self) -> Any:
        with waits:
            return self._begun.result().get_future()
