"""A careful user's own checkpoints, published atomically: one file for replicated state, a directory for sharded.

What only sharded state needs is imported there: it would add a second to every restart of the other.
"""

import os
import shutil

import torch
import torch.distributed as dist
import workload

LATEST = workload.CHECKPOINT / "latest"


def due(step: int) -> bool:
    return workload.CHECKPOINT_EVERY > 0 and step % workload.CHECKPOINT_EVERY == 0


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Called on all ranks."""
    if workload.SHARDED:
        _save_shards(model, optimizer, step)
    elif dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, LATEST.with_suffix(".new"))
        os.replace(LATEST.with_suffix(".new"), LATEST)


def _save_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(_shards(model, optimizer), checkpoint_id=workload.CHECKPOINT / f"step-{step}")
    if dist.get_rank() == 0:
        LATEST.with_suffix(".new").write_text(str(step))
        os.replace(LATEST.with_suffix(".new"), LATEST)
        shutil.rmtree(workload.CHECKPOINT / f"step-{step - workload.CHECKPOINT_EVERY}", ignore_errors=True)


def _shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step that the newest checkpoint was made after; 0 if there is none."""
    if not LATEST.exists():
        return 0
    if workload.SHARDED:
        return _resume_shards(model, optimizer)
    state = torch.load(LATEST)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _resume_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    step, state = int(LATEST.read_text()), _shards(model, optimizer)
    dcp.load(state, checkpoint_id=workload.CHECKPOINT / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step
