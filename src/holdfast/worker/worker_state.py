"""A worker's state: the tracked objects, and everything that protects them from a fault.

The engine (engine.py) decides when a step is committed, repeated or taken over from other ranks; this class does to the
tracked objects what each of these needs:

    transaction        undoes the step under way (transaction.py)
    replica ring       copies of sharded state in other ranks' memory (restore/peer_replicas.py)
    local state        what each rank has for itself (restore/local_state.py)
    snapshots          images in the agent's memory (snapshot/taker.py)
    device fence       a state on a device that runs behind the host (device_wait.py)

Models are put in order, loaders are given their share, and newcomers get the state of the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.events import DataSource, SessionInfo
from holdfast.core.image_info import ImageInfo
from holdfast.core.memory_plan import copies_by_default
from holdfast.core.shard_map import ShardMap
from holdfast.data.batch_source import BatchSource
from holdfast.errors import ScriptError
from holdfast.state.arena import Arena
from holdfast.state.optimizers import mark_of_settings
from holdfast.state.per_rank_state import StatePart
from holdfast.state.plain_values import mark_of_values
from holdfast.state.tracked import Tracked
from holdfast.util.logs import get_logger
from holdfast.wire.progress_page import ProgressPage
from holdfast.wire.worker_messages import Assignment, SnapshotSettings, StreamReportedMessage
from holdfast.worker import elastic, tracked_loaders
from holdfast.worker.agent_connection import AgentConnection
from holdfast.worker.collectives import groups, small_collectives
from holdfast.worker.collectives.waits import waits
from holdfast.worker.determinism import describe_missing
from holdfast.worker.device_wait import DeviceFence, fence_of
from holdfast.worker.device_watch import DeviceWatch
from holdfast.worker.outside_steps import ReplicaFreshness
from holdfast.worker.parallel import pipelines
from holdfast.worker.parallel.holdings import own_part
from holdfast.worker.parallel.models import (
    align_buffers,
    check_unfrozen,
    gathering_devices,
    reset_models,
)
from holdfast.worker.parameters_since_track import ParametersSinceTrack
from holdfast.worker.replica_check import Due, ReplicaCheck
from holdfast.worker.restore import from_checkpoints, from_peers, from_twins, reshard_live
from holdfast.worker.restore.from_twins import ShardKey
from holdfast.worker.restore.local_state import LocalState
from holdfast.worker.restore.peer_replicas import ReplicaRing
from holdfast.worker.restore.restore_source import RestorePoint, find_start
from holdfast.worker.resume_point import RankStatus, ResumePoint
from holdfast.worker.sample_recorder import describe
from holdfast.worker.shard_copies import check_memory, say_not_copied
from holdfast.worker.snapshot.taker import NO_VOTE, SnapshotTaker
from holdfast.worker.state_sharding import StateSharding
from holdfast.worker.tracked_loaders import Sizing
from holdfast.worker.transaction import StepTransaction
from holdfast.worker.undo_copy import UndoCopy

log = get_logger(__name__)


class WorkerState:
    """The tracked objects of one worker and their protection."""

    def __init__(
        self,
        tracked: Tracked,
        page: ProgressPage,
        agent: AgentConnection | None,
        *,
        replicas: int = 0,
        are_replicas_default: bool = False,
        checkpoint_dir: str = "",
        snapshots: SnapshotSettings | None = None,
        sizing: Sizing | None = None,
    ) -> None:
        self._tracked, self._page, self._agent = tracked, page, agent
        self._replicas, self._checkpoint_dir, self._snapshot_settings = replicas, checkpoint_dir, snapshots
        self._are_replicas_default = are_replicas_default
        self.sizing = sizing or Sizing()
        self.pipelines: list[Any] = []
        """The schedules of pipelines, which are no state."""
        self.sharding = StateSharding()
        self._is_alone = self._has_session = False
        """Whether other ranks train already, beside whom this one was started; whether steps are repaired."""
        self._made_by = 0
        """The number of ranks that the last step was begun with; 0: none was."""
        self._is_filled = True
        """Whether the objects hold the state, if this rank has it; otherwise it is in `_carried`."""
        self._carried: list[tuple[ShardKey, Arena]] = []
        """Copies from before the objects were rebuilt."""
        self._ring: ReplicaRing | None = None
        self._freshness: ReplicaFreshness | None = None
        self._shard_copies = replicas
        """Copies of each shard in other ranks' memory."""
        self._local = LocalState(tracked, replicas)
        self._snapshots: SnapshotTaker | None = None
        self._restored_snapshot = (-1, False)
        """The step that all have started from, if it was in the agents' memory, and whether no node has lost its
        part."""
        self._fence: DeviceFence | None = None
        self._device_watch: DeviceWatch | None = None
        self._replica_check = ReplicaCheck()
        self._transaction: StepTransaction | None = None
        self._since_track = ParametersSinceTrack()

    @property
    def transaction(self) -> StepTransaction | None:
        """The step under way; None before the first."""
        return self._transaction

    # --- before the first step

    def follow_pipelines(self, schedules: list[Any]) -> None:
        """Put these pipeline schedules in order in every view."""
        self.pipelines = schedules
        for schedule in schedules:
            pipelines.prepare(schedule)

    def measure(self, *, is_alone: bool, expected: ShardMap | None) -> None:
        """Find out how the tracked objects are cut, once they are complete. `is_alone`: other ranks train already, and
        `expected` is how theirs are, as far as that is known."""
        self.sharding.measure(self._tracked, is_alone=is_alone, expected=expected)
        self._is_alone = is_alone
        if is_alone:
            return
        self._tracked.owner = (dist.get_rank(), dist.get_world_size())
        self._since_track.begin(self._tracked)

    @property
    def shard_map(self) -> ShardMap:
        """Which shard of the state each rank has."""
        return self.sharding.shard_map

    @property
    def _is_cut(self) -> bool:
        """Whether the objects are made for one rank of one world."""
        return self.sharding.is_cut(self._tracked.modules().values())

    def restore(self, assignment: Assignment | None) -> RestorePoint | None:
        """Load the newest state that all ranks can load, from the agents' memory or from storage; all ranks together.
        Return where it came from, or None if there is none."""
        if not self._checkpoint_dir:
            return None
        local = (assignment.local_rank, assignment.local_world_size) if assignment is not None else (0, 1)
        images = self._agent.list_images() if self._agent is not None and assignment is not None else ()
        exchange = small_collectives.in_session()
        found = find_start(self._checkpoint_dir, images, local, self._tracked, self.shard_map, exchange)
        if found is None:
            return None
        self._local.adopt(found.step if self._tracked.gradients_are_local else -1)
        self.sizing.divided_for = found.world_size if found.step else 0
        self._since_track.restored(self._tracked, found.step)
        if found.is_recalled:
            self._restored_snapshot = (found.step, found.is_intact)
            if self._snapshots is not None:
                self._snapshots.start_from(*self._restored_snapshot)
        return found

    def begin(self, *, has_session: bool) -> None:
        """Choose how steps are undone; everything is built and tracked."""
        if has_session:
            self._since_track.check(self._tracked)
        self._tracked.flags.begin()
        own = {parameter.device for parameter in self._tracked.parameters()}
        devices = own | gathering_devices(self._tracked.modules().values())
        self._fence = fence_of(devices) if has_session else None
        self._shard_copies = self._choose_copies()
        self._has_session = has_session
        self._transaction = StepTransaction(self._tracked, self._page, UndoCopy(self._tracked))
        self._fit_ring()

    def _fit_ring(self) -> None:
        """Copy the state to other ranks where the loss of one node would take it away. That may be another matter in
        each view: it depends on which ranks share a node."""
        is_needed = self._has_session and self._is_cut and self._needs_ring()
        if is_needed == (self._ring is not None) or self._transaction is None:
            return
        self._ring = None
        if is_needed:
            is_on_device, has_snapshots = self._fence is not None, self._has_snapshots
            check_memory(self._tracked, self.replicas, self._is_alone, is_on_device, has_snapshots)
            self._ring = ReplicaRing(self._tracked, self._ring_copies)
        self._freshness = ReplicaFreshness(self._tracked) if self._ring is not None else None
        self._transaction.undo_with(self._ring or UndoCopy(self._tracked))

    def _choose_copies(self) -> int:
        """Return how many copies of a shard are kept in other ranks' memory."""
        chosen = copies_by_default(
            self._replicas,
            is_default=self._are_replicas_default,
            is_on_device=self._fence is not None,
            has_snapshots=self._has_snapshots,
            is_elastic=elastic.is_inside(),
        )
        if chosen < self._replicas and self.shard_map.shards > 1 and os.environ.get("RANK") == "0":
            say_not_copied(self._tracked)
        return chosen

    @property
    def _has_snapshots(self) -> bool:
        return self._snapshot_settings is not None and self._snapshot_settings.every >= 0 and self._agent is not None

    def _needs_ring(self) -> bool:
        """Return whether a sharded state is copied. A rank that may be built again for another world keeps a copy of
        its own, also where no other rank needs one."""
        return bool(self.replicas) or (elastic.is_inside() and not self._local.is_there)

    def begin_session(self, describe_run: Callable[[], tuple[dict[str, float], dict[str, str]]]) -> None:
        """Take snapshots from now on, and check what cannot be repaired."""
        if self._has_snapshots:
            assert self._snapshot_settings is not None and self._agent is not None
            self._snapshots = SnapshotTaker(self._agent, self._tracked, self._snapshot_settings, describe_run)
            self._snapshots.start_from(*self._restored_snapshot)
        check_unfrozen(self._tracked.modules().values())
        if self._fence is not None and self._device_watch is None:
            self._device_watch = DeviceWatch(self._page, self._fence)
            self._device_watch.start()
        is_first = os.environ.get("RANK") == "0"
        if self._fence is not None and is_first and (missing := describe_missing(self._fence.kind, os.environ)):
            log.warning("bits-not-fixed", missing)

    @property
    def built_for(self) -> tuple[int, int] | None:
        """The rank and the size of the world that the objects are made for; None: they do for any."""
        is_laid_out = self._is_cut or tracked_loaders.common_coordinates(self._tracked) is not None
        return (dist.get_rank(), dist.get_world_size()) if is_laid_out else None

    @property
    def runs_on_device(self) -> bool:
        """Return whether the state is on a device that runs behind the host."""
        return self._fence is not None

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return all tensors of the tracked state."""
        return self._tracked.state().tensors

    def rebuild(self, tracked: Tracked, next_step: int) -> None:
        """Let go of all objects: others will be built, for another rank or world size. Their state stays in copies, of
        the next step and of the one after, as that may turn out to be committed."""
        if self._ring is not None:
            self._carried += [
                (self.sharding.key_of(shard), copy)
                for step in (next_step, next_step + 1)
                for shard, copy in self._ring.copies_at(step, self.shard_map, self.sharding.rank).items()
            ]
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None  # it knows the old model, which must go before the new one comes
        self._tracked, self._ring, self._transaction = tracked, None, None
        self._freshness = None  # the old model's, too
        self.pipelines = []
        self.sharding.start_over()
        self.sizing.divided_for = 0  # the new objects are built for the ranks there are then
        self._local = LocalState(tracked, self._replicas)
        self._is_filled = False

    # --- into a view

    def add_to(self, status: RankStatus) -> RankStatus:
        """Return what this rank says of itself, with what it holds."""
        return status._replace(
            shards=self.shard_map.shards if self._is_filled else 0,
            shard=self.sharding.shard,
            owner_rank=self._tracked.owner[0] if self._tracked.has_local else -1,
            owner_world=self._tracked.owner[1],
            local_since=self._local.since,
            has_device_groups=int(groups.has_device_groups()),
            holdings=self.sharding.holdings,
        )

    @property
    def local_since(self) -> int:
        """The first step that begins with gradients which differ between ranks; -1: there was none."""
        return self._local.since

    @property
    def can_be_saved_alone(self) -> bool:
        """Return whether this rank has all of the state, and can write it to the agent's memory without others."""
        is_complete = (
            self._is_filled and self.shard_map.shards == 1 and self._ring is None and self._snapshots is not None
        )
        return is_complete and not self._local.is_there  # of what other ranks have for themselves there are only copies

    def save_alone(self, assignment: Assignment, step: int) -> None:
        """Write all of the state to the agent's memory, as every rank of the next view would."""
        assert self._snapshots is not None
        self._snapshots.save_alone(assignment.world_size, assignment.view, step)

    def prepare(self, resume: ResumePoint, assignment: Assignment) -> None:
        """Put models and loaders in order for a rank of a new view."""
        elastic.let_go()
        self.sharding.adopt(resume, assignment, is_filled=self._is_filled)
        reset_models(self._tracked.modules().values())  # first: a broken pass leaves parameters in other hands
        for schedule in self.pipelines:
            pipelines.reset(schedule)
        for loader in tracked_loaders.loaders(self._tracked):
            weights = (
                loader.bearable(assignment.world_size, assignment.weights) if isinstance(loader, BatchSource) else None
            )
            loader.set_assignment(assignment.rank, assignment.world_size, *([weights] if weights else []))
        self._tracked.owner = (assignment.rank, assignment.world_size)
        self.sizing.divided_for = self.sizing.divided_for or assignment.world_size
        self.sizing.check_size(self._tracked, assignment.world_size)

    def fill(self, resume: ResumePoint, assignment: Assignment) -> None:
        """Give newcomers the state of the others; all members of the view together."""
        self._local.adopt(resume.local_since)
        self._local.fit_ring(assignment.world_size, is_carried=self._ring is not None)
        if reshard_live.is_needed(resume, self.shard_map):
            held, wanted = self._copies_at(resume.next_step), self.sharding.wanted(resume)
            if not from_twins.carry_out(held, wanted, resume.next_step, assignment, self._tracked):
                offers = {(key.shards, key.shard): copy for key, copy in held.items()}
                reshard_live.carry_out(offers, resume.next_step, self._tracked, self.shard_map)
            return
        size, has_own_ring = assignment.world_size, self._local.is_there and self._ring is None
        local_copies = self._local.copies(size) if has_own_ring else None
        copies = self._ring_copies if self._ring is not None else 0
        transfers = from_peers.plan(resume, assignment.first_ranks, size, self.shard_map, copies, local_copies)
        rings = {StatePart.ALL: self._ring, StatePart.LOCAL: self._local.ring}
        from_peers.carry_out(transfers, resume, assignment, self._tracked, rings)

    def protect(self, resume: ResumePoint, assignment: Assignment, seed: int) -> None:
        """Copy the state to other ranks, and let snapshots follow the new view; all members together."""
        self._fit_ring()
        if (ring := self._any_ring) is not None:
            copied = self.sharding.lonely_ranks if ring is self._ring else None
            ring.assignment(assignment.first_ranks, assignment.rank, assignment.world_size, copied)
            ring.exchange(resume.next_step)
            groups.agree((resume.next_step,))
            ring.promote()
        self._local.record_copied()
        if self._snapshots is not None:
            image = ImageInfo(
                *(-1, *own_part(self.shard_map, assignment.rank, assignment.world_size), assignment.view),
                seed=seed,
                first_step=resume.first_step,
            )
            # Ranks that all start from a checkpoint have gone back: what the agent knows is of steps after it.
            complete_version = -1 if resume.is_start else assignment.complete_version
            self._snapshots.enter(image, assignment.group_world_size, complete_version)
            self._snapshots.faults_per_node_day = assignment.faults_per_node_day

    def complete_join(self) -> None:
        """Record that the objects hold the state, on every rank of the view."""
        self._is_filled = True
        assert self._transaction is not None
        self._transaction.updated_before = not self._tracked.is_accumulating

    def dump(self, directory: str, step: int, seed: int, assignment: Assignment) -> None:
        """Write a checkpoint of the last committed step; all members of the view together."""
        shards, parts = self.shard_map.shards, {self.sharding.shard: self._tracked.state()}
        if self._ring is not None:
            copies = {(key.shards, key.shard): copy for key, copy in self._copies_at(step).items()}
            shards = reshard_live.choose(copies, step).shards
            parts = {shard: copy.flat() for (cut, shard), copy in copies.items() if cut == shards}
        world_size = self._made_by or assignment.world_size
        from_checkpoints.write(directory, step, parts, shards, assignment, seed, world_size)

    # --- a step

    def begin_attempts(self, step: int) -> None:
        """Start the snapshot that is due, before a step is handed to the script."""
        self._made_by = dist.get_world_size() if dist.is_initialized() else 1
        if self._snapshots is not None:
            self._snapshots.begin(step)

    def check_outside(self) -> None:
        """Check what code outside of steps has changed after a committed step."""
        if self._freshness is not None:
            self._freshness.compare()
        self._local.check()

    def before_update(self, optimizer: Any) -> None:
        """Wait until a snapshot under way has what this optimizer is about to change; None: all of it."""
        if self._snapshots is not None:
            self._snapshots.join(optimizer)

    def undo(self, next_step: int) -> None:
        """Put back what the step under way has changed."""
        assert self._transaction is not None
        self.before_update(None)
        self._transaction.undo()
        self._tracked.is_accumulating = not self._transaction.updated_before
        self._local.drop_uncommitted(next_step)

    def finish_step(self) -> None:
        """Count the step, whose body is through, in loaders and snapshots."""
        assert self._transaction is not None
        self._tracked.is_accumulating = not self._transaction.has_updated
        if self._snapshots is not None:
            self._snapshots.poll()
        for loader in tracked_loaders.loaders(self._tracked):
            loader.commit_drawn()
        if self._freshness is not None:
            self._freshness.committed()

    def prepare_commit(self, step: int, assignment: Assignment) -> bool:
        """Check and align what must be alike on all ranks; all together. Return whether gradients turned out to be each
        rank's own, which are copied to other ranks from now on."""
        assert self._transaction is not None
        if self._tracked.flags.has_unfrozen:
            check_unfrozen(self._tracked.modules().values())
        self.align_buffers()
        self._tracked.is_accumulating = self._transaction.leaves_gradients
        if not self._local.compare_gradients(step, self.shard_map):
            return False
        self._local.fit_ring(assignment.world_size, is_carried=self._ring is not None)
        if self._local.ring is not None:
            self._local.ring.assignment(assignment.first_ranks, assignment.rank, assignment.world_size)
        return True

    def send_replicas(self, step: int) -> None:
        """Copy the state before this step to other ranks, where that is how it is protected."""
        if (ring := self._any_ring) is not None:
            for loader in tracked_loaders.loaders(self._tracked):
                loader.commit_drawn()  # the copies are of the state after the step; a repeated one goes back
            ring.exchange(step)

    def complete_commit(self) -> None:
        """Keep the copies of the step that is committed now: it will not be undone any more, on any rank."""
        self._carried.clear()
        if (ring := self._any_ring) is not None:
            ring.promote()
        self._local.record_copied()

    @property
    def copies_at_end(self) -> bool:
        """Return whether the state can be copied only at the end of a step, as it may change until then."""
        return self._ring is not None or (self._local.ring is not None and bool(self._tracked.local_names()))

    def expect_replica_check(self) -> None:
        """Have ranks that should have the same state compare it in the first steps of a run."""
        self._replica_check.want()

    def record_join(self, step: int) -> None:
        """Have ranks compare their state some commits after a recovery, which gave it to newcomers before this step."""
        self._replica_check.joined(step)

    @property
    def replica_check_due(self) -> Due:
        """Whether, and why, ranks that should have the same state are to compare it at this commit."""
        return self._replica_check.due

    @property
    def values_mark(self) -> int:
        """A checksum of the plain values that all ranks have alike."""
        return mark_of_values(self._tracked)

    @property
    def update_mark(self) -> int:
        """A checksum of whether this step makes an update, and of the settings of the optimizers that ranks share."""
        assert self._transaction is not None
        left_out, settings = self._tracked.local_names(), 0
        if self.shard_map.shards == 1 or (
            self.sharding.declared is None and not self.pipelines
        ):  # stages have their own
            shared = (one for name, one in self._tracked.optimizers().items() if name not in left_out)
            settings = mark_of_settings(shared)
        return 2 * settings + int(self._transaction.leaves_gradients)

    def check_replicas(self, due: int) -> None:
        """Compare the state with that of other ranks, if any rank wants it; all together."""
        if due:
            self._compare_replicas()
        self._replica_check.committed()

    def check_at_end(self) -> None:
        """Compare the state once more behind the last step, if there was a recovery; all together: a script may have
        used what is not tracked only after the comparisons."""
        if self._replica_check.joined_at >= 0:
            self.align_buffers()
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Raise ScriptError if ranks differ. A difference after a recovery may be in the snapshots since then, too."""
        assert self._transaction is not None
        try:
            has_updated = self._transaction.has_updated
            self._replica_check.compare(self._tracked, has_updated, self.shard_map, groups.gather)
        except ScriptError:
            if self._replica_check.joined_at >= 0:
                self.distrust_snapshots(self._replica_check.joined_at)
            raise

    def align_buffers(self) -> None:
        """Give the buffers of DDP the values of rank 0. Before an update too: what follows it, such as an average of
        the model, then finds the same ones on every rank, wherever the step is committed."""
        align_buffers(self._tracked.modules().values())

    def snapshot_vote(self, step: int) -> tuple[int, ...]:
        """Return what this rank says of its snapshots when a step is committed."""
        return self._snapshots.vote(step) if self._snapshots is not None else NO_VOTE

    def snapshot_agreed(self, step: int, votes: Sequence[int]) -> None:
        """Follow what all ranks said of their snapshots."""
        if self._snapshots is not None:
            self._snapshots.apply_vote(step, votes)

    def distrust_snapshots(self, after: int) -> None:
        """Do not restore from snapshots taken after this step: the state may have been wrong since."""
        if self._snapshots is not None:
            self._snapshots.discard_after(after)

    def wait_for_device(self, timeout_s: float) -> None:
        """Wait until all that the device was told is done, by collectives that were not broken."""
        if self._fence is not None and dist.get_world_size() > 1:
            with waits:  # what is queued there may be a collective
                self._fence.wait(groups.check, timeout_s)
            groups.check_communicators()

    def settle_device(self) -> None:
        """Wait until the device is at rest after an abort; DeviceError if it does not come to it."""
        if self._fence is not None and groups.is_revoked():
            groups.wait_until_freed()
            self._fence.settle()

    def end(self, step: int) -> None:
        """Take the last snapshot; there are no more steps."""
        if self._device_watch is not None:
            self._device_watch.close()
        if self._snapshots is not None:
            self._snapshots.take_last(step)
            self._snapshots.close()

    # --- what it is

    def audited(self) -> dict[str, Any]:
        """Return the tracked loaders that say which samples they hand out, by name."""
        return tracked_loaders.audited(self._tracked)

    def data_sources(self) -> tuple[DataSource, ...]:
        """Return what the order of each loader's samples follows from."""
        return describe(self.audited())

    def stream_reports(self, view: int, step: int) -> Iterator[StreamReportedMessage]:
        """Yield what the commit of a step has granted to streams, and which shards could not be read."""
        return tracked_loaders.stream_reports(self._tracked, view, step)

    def positions(self) -> dict[str, str]:
        """Return the position of each loader, for a checkpoint's manifest."""
        return tracked_loaders.positions(self._tracked)

    def session_info(self) -> SessionInfo:
        """Return what the agent needs to know of this state to choose how to recover."""
        is_cut, modules = self._is_cut, self._tracked.modules().values()
        is_resizable = not is_cut or (self._ring is not None and elastic.is_inside())
        can_be_cut = is_cut or not self.sharding.is_known
        why_fixed = self.sizing.why_fixed(self._tracked, is_per_rank=self._local.is_there, is_cut=can_be_cut)
        local_copies = self.replicas
        if self._local.is_there and self._ring is None:
            local_copies = self._local.copies(dist.get_world_size())
        return SessionInfo(
            shard_map=self.shard_map,
            replicas=self.replicas,
            resizable=is_resizable and not why_fixed,
            per_rank=self._local.is_there,
            local_replicas=local_copies if self._local.is_there else 0,
            why_fixed=why_fixed,
            world_multiple=self.sharding.multiple(modules),
            world_size=dist.get_world_size() if self.sharding.is_known else 0,
        )

    @property
    def replicas(self) -> int:
        """How many other ranks keep a copy of each shard that the loss of one node would take away."""
        return self._ring_copies if self.sharding.lonely_ranks else 0

    @property
    def _ring_copies(self) -> int:
        return min(self._shard_copies, dist.get_world_size() - 1)

    def _copies_at(self, step: int) -> dict[ShardKey, Arena]:
        """Return the complete copies of the state before a step that are here, by what they are of."""
        found = {key: copy for key, copy in self._carried if copy.is_complete and copy.step == step}
        own = {}
        if self._ring is not None:
            own = self._ring.copies_at(step, self.shard_map, self.sharding.rank)
        return found | {self.sharding.key_of(shard): copy for shard, copy in own.items()}

    @property
    def _any_ring(self) -> ReplicaRing | None:
        """The ring that carries everything, or what each rank has for itself."""
        return self._ring or self._local.ring
