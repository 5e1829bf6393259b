"""The private API of torch that Holdfast uses: all of it is here, each use with its reason.

torch promises nothing about names that begin with an underscore, and online recovery cannot do without some of them:
DistributedDataParallel has no public way to forget a broken backward pass, nor FSDP2, nor DTensor to forget a mesh.
Every other module calls the functions below. All of them were tried with the versions in `TORCH_TESTED`; with any
other version a warning says so once a process, and a name that is not there any more ends in a `TorchVersionError`
that says which.

`ProcessGroup` (elastic_group.py) and the iterators of DataLoader (hand_drawn_batches.py) are subclassed or wrapped
where they are used: there torch calls our methods, and not the other way round.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Documented as names of torch.distributed, which exports them without declaring it.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import ProcessGroup as ProcessGroup
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import Work as Work
from torch._utils import ExceptionWrapper as ExceptionWrapper  # how a DataLoader's workers send an exception
from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten as tree_flatten  # torch's own walk over nested batches
from torch.utils._pytree import tree_unflatten as tree_unflatten

from holdfast.errors import TorchVersionError
from holdfast.util.logs import get_logger
from holdfast.util.versions import TORCH_TESTED, is_tested

log = get_logger(__name__)

MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes of a module that hold its hooks: a repeated step needs those from before it. Seen in 2.13."""
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The same of a parameter. Seen in 2.13."""
COMPILED_MODULE = "_orig_mod"
"""The attribute in which what `torch.compile` returns has the module. Seen in 2.13."""

BATCH_NORMS = _NormBase
"""The class of every module that keeps running statistics of its batches. Seen in 2.13."""

P = ParamSpec("P")
R = TypeVar("R")
_warned_in = 0
"""The process that has warned of an untested version: a worker may be forked from one that has."""


def warn_if_untested() -> None:
    """Log a warning if this version of torch is not among those that Holdfast is tested with; once a process."""
    global _warned_in
    if _warned_in == os.getpid() or is_tested(torch.__version__, TORCH_TESTED):
        return
    _warned_in = os.getpid()
    log.warning(
        "torch-untested",
        f"torch {torch.__version__} is not among the versions that this Holdfast is tested with"
        f" ({', '.join(TORCH_TESTED)}): online recovery uses private parts of torch, which may differ. Try a fault"
        " on a short run before you rely on it",
    )


def private(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function that uses private API say so in a sentence when a name is not there."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except (AttributeError, ImportError) as error:
            raise version_error(function.__name__, error) from error

    return call


def version_error(use: str, error: BaseException) -> TorchVersionError:
    """Return the error for a use of private API that failed."""
    return TorchVersionError(
        f"torch {torch.__version__} has no longer what Holdfast needs for {use} ({error}): use torch"
        f" {' or '.join(TORCH_TESTED)}, or run this script without a session"
    )


# --- tensors


def version_of(tensor: Tensor) -> int:
    """Return torch's count of changes to a tensor: the cheapest sign that a script has written to it. Seen in 2.13."""
    return tensor._version


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy many tensors in one call, without which small ones cost more than their bytes. Seen in 2.13."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def add_all(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add many tensors to others in one call, as `copy_all` copies them. Seen in 2.13."""
    torch._foreach_add_(list(targets), list(others))


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each of many tensors, computed in one call. Seen in 2.13."""
    return list(torch._foreach_norm(list(tensors)))


def memory_of_dtensor(tensor: Any) -> Tensor:
    """Return the live local tensor of a DTensor: `to_local()` costs an autograd node each time. Seen in 2.13."""
    return cast(Tensor, tensor._local_tensor)


set_grad_enabled = torch._C._set_grad_enabled
"""Sets the gradient mode for good; the public one is a context manager that puts it back. Seen in 2.13."""


@private
def device_generator() -> tuple[str, Any] | None:
    """Return the kind of accelerator in use, and its module of torch (`torch.cuda`, `torch.npu`, …), which has
    `manual_seed`, `get_rng_state` and `set_rng_state` for the current device. None if this process has used none, or if
    it was initialised before this process was forked: then asking for its random state raises, and there is no public
    way to know before. Seen in 2.13."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    is_initialized = getattr(module, "is_initialized", None) or module.is_available
    if not hasattr(module, "get_rng_state") or not is_initialized() or getattr(module, "_is_in_bad_fork", bool)():
        return None
    return kind.type, module


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile neither traces into nor compiles pieces of: a hook of ours, called from a
    compiled `optimizer.step`. `torch.compiler.disable` does that, and imports the compiler, which takes a second; so it
    is used only if the script has imported that. Seen in 2.13."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


# --- modules and optimizers


def tensors_held(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the live tables of a module's own parameters and buffers: the public iterators make copies, and leave out
    what is None. Seen in 2.13."""
    return module._parameters, module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the live table of a module's submodules, including empty places and those that occur twice. Seen in
    2.13."""
    return module._modules


def copy_metadata(source: Any, target: Any) -> None:
    """Copy the versions of modules that a state_dict carries, which tell `load_state_dict` how to read it. Seen in
    2.13."""
    target._metadata = getattr(source, "_metadata", None)


@private
def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks are registered that change what an optimizer saves or loads; torch has no public way to
    ask. Seen in 2.13."""
    return any(
        (
            optimizer._optimizer_load_state_dict_pre_hooks,
            optimizer._optimizer_load_state_dict_post_hooks,
            optimizer._optimizer_state_dict_pre_hooks,
            optimizer._optimizer_state_dict_post_hooks,
        )
    )


@private
def forget_unscaled(scaler: Any) -> None:
    """Make a GradScaler forget that gradients were unscaled: an `unscale_()` in a step that is repeated would forbid
    the next one. Seen in 2.13."""
    scaler._per_optimizer_states.clear()


def is_scaler_in_use(scaler: Any) -> bool:
    """Return whether a GradScaler has scaled a loss: its scale is made then. Seen in 2.13."""
    return getattr(scaler, "_scale", None) is not None


# --- DataLoader


@private
def dataset_of(iterator: Any) -> Any:
    """Return the dataset that a DataLoader's iterator reads. Seen in 2.13."""
    return iterator._dataset


@private
def batches_drawn(iterator: Any) -> int:
    """Return how many batches a DataLoader's iterator has given. Seen in 2.13."""
    return int(iterator._num_yielded)


@private
def is_iterator_of(loader: Any, iterator: Any) -> bool:
    """Return whether an iterator was made by this DataLoader: they have the dataset and the sampler in common. Seen in
    2.13."""
    return loader.dataset is iterator._dataset and loader._index_sampler is iterator._index_sampler


@private
def end_loader_workers(loader: Any) -> None:
    """End the processes of a DataLoader with persistent workers, and make it start others: there is no public way.
    Seen in 2.13."""
    shutdown = getattr(loader._iterator, "_shutdown_workers", None)
    loader._iterator = None
    if shutdown:
        shutdown()


@private
def has_dead_workers(loader: Any) -> bool:
    """Return whether a process of a DataLoader has died: torch itself would wait for its answer for seconds. Seen in
    2.13."""
    return not all(worker.is_alive() for worker in getattr(loader._iterator, "_workers", ()))


# --- torch.distributed


@private
def default_group() -> ProcessGroup:
    """Return the default process group as an object: public functions use it and do not hand it out. Seen in 2.13."""
    return distributed_c10d._get_default_group()


@private
def group_or_default(group: Any) -> ProcessGroup:
    """Return the group that a collective called with `group=` means. Seen in 2.13."""
    return distributed_c10d._group_or_default_group(group)


@private
def update_group_tables(groups: Iterable[tuple[Any, Sequence[int]]], store: Callable[[], Store]) -> None:
    """Write a view's members and store into torch's own tables of groups, from which `get_global_rank` and new
    subgroups read. `groups`: each with its members' global ranks. What a coalesced block left there, if an exception
    ended it, goes: else torch would note all later collectives too, and make none of them. Seen in 2.13."""
    world = distributed_c10d._world
    world.pg_coalesce_state.clear()
    for group, members in groups:
        if group in world.pg_map:
            world.pg_map[group] = (world.pg_map[group][0], store())
            world.pg_group_ranks[group] = {member: at for at, member in enumerate(members)}


@private
def ask_groups_for_batches() -> None:
    """Have `batch_isend_irecv` ask groups that have a method `batch_transfers`: torch begins transfers together for
    groups of exactly its own class only. Any number of times. Seen in 2.13."""
    original = distributed_c10d.batch_isend_irecv

    @functools.wraps(original)
    def call(p2p_op_list: list[Any]) -> list[Work]:
        first = p2p_op_list[0] if isinstance(p2p_op_list, list) and p2p_op_list else None
        group = distributed_c10d._group_or_default_group(getattr(first, "group", None))
        batch = getattr(group, "batch_transfers", None)
        return cast(list[Work], original(p2p_op_list) if batch is None else batch(original, p2p_op_list))

    if not hasattr(original, "__wrapped__"):
        distributed_c10d.batch_isend_irecv = dist.batch_isend_irecv = call


@private
def completed_work(result: list[Tensor]) -> Work:
    """Return the handle of a collective that is done: C++ callers of a process group want a `Work` of their own. Seen
    in 2.13."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(result)
    return cast(Work, _create_work_from_future(future))


@private
def make_gloo(store: Store, rank: int, size: int, device: Any, connect: timedelta, timeout: timedelta) -> Any:
    """Connect a gloo backend through a device of ours: the public constructor makes a listener of its own for each
    group. `connect` limits connecting, `timeout` each collective. Seen in 2.13."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = connect
    inner = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    inner._set_default_timeout(timeout)
    inner._set_sequence_number_for_group()
    return inner


@private
def make_nccl(store: Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]) -> Any:
    """Make an NCCL backend that connects without blocking, so that it can be aborted while it does; the public
    constructor of groups leaves no choice. Seen in the declarations of 2.13; not run on a GPU by the tests."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    options.group_name = name  # these two for torch's flight recorder
    options.global_ranks_in_group = list(ranks)
    inner = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    inner._set_sequence_number_for_group()
    return inner


@private
def backend_error(inner: Any) -> str:
    """Return the name of the error that a backend's watchdog has seen, or nothing. Seen in the declarations of
    2.13."""
    from torch._C._distributed_c10d import ErrorType

    error = inner.get_error()
    return "" if error == ErrorType.SUCCESS else str(error.name)


@private
def make_xccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make Intel's backend. Seen in the declarations of 2.13; not run by the tests."""
    from torch._C._distributed_c10d import ProcessGroupXCCL

    options = ProcessGroupXCCL.Options()
    options._timeout = timeout
    return ProcessGroupXCCL(PrefixStore("xccl", store), rank, size, options)


@private
def make_hccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make Huawei's backend, of the package torch_npu. Not run by the tests."""
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL  # type: ignore[import-not-found]

    options = ProcessGroupHCCL.Options()
    options._timeout = timeout
    return ProcessGroupHCCL(PrefixStore("hccl", store), rank, size, options)


@private
def backend_creator(name: str) -> Callable[..., Any] | None:
    """Return what makes a backend that was registered with torch under this name, or None. Seen in 2.13."""
    plug_in = dist.Backend._plugins.get(name.upper())
    return plug_in.creator_fn if plug_in is not None else None


@private
def forget_meshes() -> None:
    """Clear what torch remembers of operations on DTensors, with the mesh it first saw: an equal mesh of a later world
    would get the old one's groups. Seen in 2.13."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _random, _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (
        propagator.propagate_op_sharding,
        propagator._propagate_tensor_meta_cached,
        _redistribute._gen_transform_infos,
        MeshTopoInfo.build_from_mesh,
    ):
        getattr(cached, "cache_clear", lambda: None)()
    _redistribute.clear_redistribute_planner_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _random._rng_tracker = None


@private
def ranks_along_mesh(mesh: Any) -> list[list[int]]:
    """Return the ranks of all parallel slices of a part of a mesh, each in the order of its dimensions: for
    `mesh["dp"]`, the ranks of every data-parallel group. `DeviceMesh.mesh` has the slice of the own rank alone. Seen in
    2.13."""
    slices = mesh._layout.remap_to_tensor(mesh._rank_map)
    found: list[list[int]] = slices.flatten(1).tolist()
    return found


@private
def begin_dtensor_random(mesh: Any) -> None:
    """Make what DTensor's random operations draw by on a device, if nothing has yet. torch makes it in the first of
    them, and has all ranks take the random state of rank 0: a replacement would be alone in that exchange, and all data
    coordinates would draw alike until the next step. It has no state of its own: it reads the device's generator, goes
    to the place of the rank's shard, and sets it behind the complete tensor. On the CPU there is none, and each rank
    draws for its shard as for a tensor of its own. Seen in 2.13."""
    from torch.distributed.tensor import _random

    if mesh.device_type == "cpu" or _random._rng_tracker is not None or not _random.is_rng_supported_mesh(mesh):
        return
    _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


# --- processes


@private
def bind_to_numa_node(mode: str, device_index: int) -> None:
    """Bind this process to the processors near a device, as torchrun's `--numa-binding` does; the public way is
    torchrun itself. Seen in 2.13."""
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    binding._maybe_apply_numa_binding_to_current_process(gpu_index=device_index, numa_options=options)


# --- DistributedDataParallel


@private
def keep_groups_beyond_reducers() -> None:
    """Make sure that no DDP's C++ part is the last user of a process group, which it would destroy while it holds the
    interpreter's lock (worker/launch/way_out.py says why that hangs). For all that are built from now on. Seen in
    2.13."""
    build = DistributedDataParallel._ddp_init_helper

    @functools.wraps(build)
    def build_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        for owner in (self.reducer, self.logger):  # the latter owns the former too
            # Called when the C++ object is gone: then the group is released, in Python, which gives the lock away.
            weakref.finalize(owner, _release, self.process_group).atexit = False

    DistributedDataParallel._ddp_init_helper = build_and_keep  # type: ignore[method-assign]


def _release(group: Any) -> None:
    """Do nothing: the group was kept as an argument."""


def comm_hooks(ddp: Any) -> list[tuple[Any, Any]]:
    """Return the communication hooks of a DDP, each with its state; DDP has no public way to ask. Seen in 2.13."""
    return list(ddp._comm_hooks)


@private
def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast rank 0's buffers now; DDP does it at the start of the next forward. Seen in 2.13."""
    ddp._sync_buffers()  # type: ignore[no-untyped-call]


@private
def reduced_parameters(ddp: Any) -> list[Tensor]:
    """Return the parameters whose gradients a DDP averages: those that required one when it was built. Seen in
    2.13."""
    now: list[Tensor] = ddp._build_params_for_reducer()[0]
    numbers = ddp.logger._get_ddp_logging_data().ints_map
    if numbers.get("num_parameter_tensors", len(now)) == len(now):
        return now
    # As large as the gradients, for a moment: only for a script that has switched flags since.
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [parameter for bucket in buckets for parameter in bucket.parameters()]


@private
def make_reducer(ddp: Any, alone: ProcessGroup) -> None:
    """Give a DDP a new reducer, with buckets that depend on the model alone (worker/parallel/ddp.py says why and how).
    `alone` is a group of one, in which the buckets are rebuilt without asking other ranks. Seen in 2.13."""
    parameters, expect_sparse = ddp._build_params_for_reducer()
    if ddp.static_graph or not ddp.find_unused_parameters:
        parameters.reverse()
        expect_sparse.reverse()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp.reducer._remove_autograd_hooks()
    ddp.reducer = ddp.logger = None  # its buckets are as large as the model: gone before the new ones are made
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    _configure_reducer(ddp)
    ddp.reducer._update_process_group(alone)
    try:
        ddp.reducer._push_all_rebuilt_params()
        ddp._has_rebuilt_buckets = bool(ddp.reducer._rebuild_buckets())
    finally:
        ddp.reducer._update_process_group(ddp.process_group)


def _configure_reducer(ddp: Any) -> None:
    """Tell a new reducer what the one before was told after it was made."""
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
        ddp._static_graph_delay_allreduce_enqueued = False
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(ddp.reducer, state, hook)
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters):
        ddp.reducer._set_optimizer_in_backward()


# --- fully_shard (FSDP2)


def fsdp_states(model: nn.Module) -> Iterator[Any]:
    """Yield the states that `fully_shard` keeps beside modules, each once: one can serve several modules. Seen in
    2.13."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
    except ImportError as error:
        raise version_error("fsdp_states", error) from error

    seen: set[int] = set()
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


@private
def fsdp_devices(model: nn.Module) -> set[torch.device]:
    """Return the devices on which the shards of a model are gathered. Seen in 2.13."""
    return {state._device for state in fsdp_states(model)}


@private
def fsdp_groups(model: nn.Module) -> list[Any]:
    """Return the groups of parameters that are gathered and reduced together. Seen in 2.13."""
    return [group for state in fsdp_states(model) for group in state._fsdp_param_groups]


@private
def has_unreduced_gradients(model: nn.Module) -> bool:
    """Return whether gradients of whole parameters, or sums over a part of the ranks, wait for a later backward. Seen
    in 2.13."""
    groups = fsdp_groups(model)
    return any(group._partial_reduce_output is not None for group in groups) or any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in groups
        for parameter in group.fsdp_params
    )


@private
def reset_fsdp(model: nn.Module) -> None:
    """Put a sharded model back to where a step begins: idle, sharded, nothing pending (worker/parallel/fsdp.py says
    why). Reduced gradients of the sharded parameters are not touched. Seen in 2.13."""
    states = list(fsdp_states(model))
    if any(state._device.type != "cpu" for state in states):
        torch.accelerator.synchronize()  # what is dropped below may be in use on another stream
    for state in states:
        _reset_fsdp_state(state)
        for group in state._fsdp_param_groups:
            _reset_fsdp_group(group)


def _reset_fsdp_state(state: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    communication = state._comm_ctx
    if hasattr(communication, "post_forward_order"):  # made by the first forward
        communication.all_gather_state = None
        for name in ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events"):
            getattr(communication, name, []).clear()


def _reset_fsdp_group(group: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    group._training_state = TrainingState.IDLE
    for name in (
        "_all_gather_result",
        "_post_reduce_event",
        "_all_reduce_state",
        "_reshard_after_forward_event",
        "_partial_reduce_output",
    ):
        setattr(group, name, None)
    group._post_forward_indices.clear()
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        parameter.grad_offload_event = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        parameter.to_sharded()  # each, as the pass may have ended between two of them
    group._sharded_state = ShardedState.SHARDED


warn_if_untested()
