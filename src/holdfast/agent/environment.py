"""The environment a worker finds: torchrun's variables, from the order that the node serves."""

from __future__ import annotations

from holdfast.agent.config import AgentConfig
from holdfast.core.orders import Serve
from holdfast.errors import LaunchError

INTRODUCTION = frozenset({"HOLDFAST_SOCKET", "HOLDFAST_WORKER", "HOLDFAST_PROGRESS"})
"""Told to each worker by itself (workers.py); those of an agent that is somebody's worker are not its workers'."""


def worker_environment(config: AgentConfig, order: Serve, local_rank: int, error_file: str) -> dict[str, str]:
    """All variables of one worker."""
    ranks = {
        "RANK": str(order.first_rank + local_rank),
        "GROUP_RANK": str(order.group_rank),
        "ROLE_RANK": str(order.role_first_rank + local_rank),
        "LOCAL_WORLD_SIZE": str(order.workers),
        "WORLD_SIZE": str(order.world_size),
        "GROUP_WORLD_SIZE": str(order.group_world_size),
        "ROLE_WORLD_SIZE": str(order.role_world_size),
        "MASTER_ADDR": order.store_host,
        "MASTER_PORT": str(order.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(order.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(order.restarts_max),
    }
    return _common(config, order.job_id, order.view, error_file) | ranks | _local_rank(config, local_rank)


def spare_environment(
    config: AgentConfig, job_id: str, view: int, world_size: int, number: int, error_file: str
) -> dict[str, str]:
    """All variables of a spare: those of rank 0, as whom it builds its model; its local rank is its own."""
    ranks = {
        "RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "LOCAL_WORLD_SIZE": str(config.workers),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": config.address,
        "MASTER_PORT": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(config.spec.restarts_max),
    }
    return _common(config, job_id, view, error_file) | ranks | _local_rank(config, number)


def _common(config: AgentConfig, job_id: str, view: int, error_file: str) -> dict[str, str]:
    environment = {name: value for name, value in config.environment.items() if name not in INTRODUCTION}
    environment |= {
        "ROLE_NAME": config.role,
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(handled.name for handled in config.signals),
        "HOLDFAST_VIEW": str(view),
    }
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return environment


def _local_rank(config: AgentConfig, local_rank: int) -> dict[str, str]:
    """Virtual: each worker sees one device, as device 0. Otherwise all of them, and its own number."""
    if not config.program.virtual_local_rank:
        return {"LOCAL_RANK": str(local_rank)}
    visible = config.environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else None
    if devices is not None and local_rank >= len(devices):
        raise LaunchError(
            f"--virtual-local-rank: worker {local_rank} has no device, CUDA_VISIBLE_DEVICES names only"
            f" {len(devices)} ({visible}): start fewer workers or name more devices"
        )
    device = devices[local_rank].strip() if devices is not None else str(local_rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}
