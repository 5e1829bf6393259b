"""DistributedDataParallel under changing membership: the same buckets on every rank, at any time.

The gradients of a bucket travel together, and ranks whose buckets differ crash each other inside gloo. Of itself DDP
lays its buckets out anew after the first backward, by the order in which gradients came; a newcomer, whose first
backward is still to come, would have others than its peers. So the layout is fixed before the first step, as a function
of the model alone: parameters in reverse order, which is about the order in which gradients come, cut by the sizes that
DDP was given.

How: the reducer is made with the parameters reversed, told that their gradients came in just this order, and asked to
rebuild. That happens in a group of one, so nobody is asked; and a reducer rebuilds only once in its life. With
`find_unused_parameters` it never does, and its first layout is a function of the model already.

After an aborted pass the same is done once more: a new reducer remembers nothing of the old one's half-done work. All
ranks must do it together, as in a static graph the first backward of a reducer communicates unlike the later ones.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from holdfast.worker.collectives.make_believe import MakeBelieve


class Alone(ProcessGroup):
    """A group of one, for asking a reducer to rebuild without asking others."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._inner = MakeBelieve(0, 1)

    def getSize(self) -> int:
        return 1

    def getRank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "alone"

    def broadcast(self, tensors: Any, *options: Any) -> Any:
        return self._inner.broadcast(tensors, *options)


def pin_buckets(ddp: DistributedDataParallel) -> None:
    """Before the first step, on every rank: fix the layout of the buckets for good."""
    make_reducer(ddp)


def reset(ddp: DistributedDataParallel) -> None:
    """After an aborted forward or backward, on every rank: the next one starts clean, with the world as it is now.

    Gradients that the aborted pass has left on the parameters are not touched.
    """
    make_reducer(ddp)


def make_reducer(ddp: Any) -> None:
    if not hasattr(ddp, "reducer"):
        return  # all its parameters are left to the user
    parameters, expect_sparse = ddp._build_params_for_reducer()
    if ddp.static_graph or not ddp.find_unused_parameters:
        parameters.reverse()
        expect_sparse.reverse()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp.reducer._remove_autograd_hooks()
    ddp.reducer = ddp.logger = None  # its buckets are as large as the model: gone before the new ones are made
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    bring_over(ddp)
    rebuild_alone(ddp)


def bring_over(ddp: Any) -> None:
    """What the old reducer was told after it was made."""
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
        ddp._static_graph_delay_allreduce_enqueued = False
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters):
        ddp.reducer._set_optimizer_in_backward()


def rebuild_alone(ddp: Any) -> None:
    alone = Alone()  # kept here: C++ alone would keep only its C++ half
    ddp.reducer._update_process_group(alone)
    try:
        ddp.reducer._push_all_rebuilt_params()
        ddp._has_rebuilt_buckets = bool(ddp.reducer._rebuild_buckets())
    finally:
        ddp.reducer._update_process_group(ddp.process_group)
