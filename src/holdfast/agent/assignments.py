"""What a worker is told of its rank: the environment it starts with (torchrun's variables) and its assignment in a
view, both from the order that the node serves. Pure. Local ranks follow core/views.py (reassign_local_ranks).
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.agent.config import AgentConfig
from holdfast.core.environment_variables import (
    PRIVATE_DEVICE_VARIABLE,
    RANK_VARIABLES,
    RETRIES_VARIABLE,
    SPARE_VARIABLE,
    with_agent_defaults,
)
from holdfast.core.orders import Serve
from holdfast.core.strategies import Strategy
from holdfast.errors import LaunchError
from holdfast.wire.worker_messages import Assignment

AGENT_VARIABLES = frozenset({"HOLDFAST_SOCKET", "HOLDFAST_WORKER", "HOLDFAST_PROGRESS", SPARE_VARIABLE})
"""Set for each worker by itself (worker_processes.py); those of an agent that is a worker itself are not inherited."""


def assignment_in(
    order: Serve,
    local_rank: int,
    *,
    newcomer: bool,
    applied_step: int,
    complete_version: int,
    checkpoint_dir: str,
    holders: int = 0,
    device: int | None = None,
    visible_devices: str = "",
    numa_binding: str = "",
) -> Assignment:
    """Return the assignment of the worker with this local rank. `holders`: how many workers of this node have been in a
    view and live. `numa_binding`: of a spare that is assigned."""
    waits_for_newcomers = order.keeps_workers and not order.planned and holders < order.workers
    is_last_holder = waits_for_newcomers and holders == 1 and order.group_world_size == 1 and not newcomer
    return Assignment(
        view=order.view,
        rank=order.first_rank + local_rank,
        world_size=order.world_size,
        local_rank=local_rank,
        local_world_size=order.workers,
        group_rank=order.group_rank,
        group_world_size=order.group_world_size,
        device=device,
        visible_devices=visible_devices,
        numa_binding=numa_binding,
        role_rank=order.role_first_rank + local_rank,
        role_world_size=order.role_world_size,
        store_host=order.store_host,
        store_port=order.store_port,
        first_ranks=order.first_ranks,
        strategy=order.strategy.value if order.strategy else "",
        planned=order.planned,
        newcomer=newcomer,
        applied_step=applied_step,
        complete_version=complete_version if order.keeps_workers else -1,
        is_last_holder=is_last_holder and order.strategy is not Strategy.DUMP,
        dump=checkpoint_dir if order.strategy is Strategy.DUMP else "",
        weights=order.weights,
        run=order.run,
        faults_per_node_day=order.faults_per_node_day,
        shard_map=order.session.map_in(order.world_size) if newcomer and order.session is not None else None,
    )


def worker_environment(
    config: AgentConfig, order: Serve, local_rank: int, device: int, error_file: str
) -> dict[str, str]:
    """Return all variables of one worker."""
    ranks = {
        "RANK": str(order.first_rank + local_rank),
        "GROUP_RANK": str(order.group_rank),
        "ROLE_RANK": str(order.role_first_rank + local_rank),
        "LOCAL_WORLD_SIZE": str(order.workers),
        "WORLD_SIZE": str(order.world_size),
        "GROUP_WORLD_SIZE": str(order.group_world_size),
        "ROLE_WORLD_SIZE": str(order.role_world_size),
        "MASTER_ADDR": config.master_name if order.store_host in config.master_addresses else order.store_host,
        "MASTER_PORT": str(order.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(order.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(order.restarts_max),
    }
    return _common(config, order.job_id, order.view, error_file) | ranks | _device_variables(config, device)


def spare_environment(
    config: AgentConfig, job_id: str, view: int, restart_count: int, error_file: str
) -> dict[str, str]:
    """Return all variables of a spare. Those of a rank are missing: it has none yet (worker/parking.py)."""
    environment = _common(config, job_id, view, error_file)
    for name in RANK_VARIABLES:
        environment.pop(name, None)  # those of an agent that is a worker itself
    if config.program.virtual_local_rank:
        environment[PRIVATE_DEVICE_VARIABLE] = "1"
    return environment | {
        SPARE_VARIABLE: "1",
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(config.spec.restarts_max),
    }


def _common(config: AgentConfig, job_id: str, view: int, error_file: str) -> dict[str, str]:
    environment = {name: value for name, value in config.environment.items() if name not in AGENT_VARIABLES}
    environment |= {
        "ROLE_NAME": config.role,
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(handled.name for handled in config.signals),
        "HOLDFAST_VIEW": str(view),
        RETRIES_VARIABLE: str(config.collective_retries),
    }
    return with_agent_defaults(environment)


def free_device(taken: Collection[int], local_rank: int) -> int:
    """Return the number of the device for a new worker: its local rank, unless a worker that has another local rank by
    now still lives on that device; then the lowest that none has. Scripts take the device that LOCAL_RANK names."""
    if local_rank not in taken:
        return local_rank
    return next(number for number in range(len(taken) + 1) if number not in taken)


def visible_devices(config: AgentConfig, device: int) -> str:
    """Return the one device that a worker sees with --virtual-local-rank, as CUDA_VISIBLE_DEVICES names it (a number,
    or the UUID of a GPU or of an instance of one); empty if it sees all. LaunchError if there is none for it."""
    if not config.program.virtual_local_rank:
        return ""
    visible = config.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(device)
    devices = [name.strip() for name in visible.split(",")]
    if device >= len(devices):
        raise LaunchError(
            f"--virtual-local-rank: worker {device} has no device, CUDA_VISIBLE_DEVICES names only"
            f" {len(devices)} ({visible}): start fewer workers or name more devices"
        )
    return devices[device]


def _device_variables(config: AgentConfig, device: int) -> dict[str, str]:
    """Return the variables that say which device a worker takes. With --virtual-local-rank it sees one, as device 0;
    otherwise it sees all of them, and its own number."""
    visible = visible_devices(config, device)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible} if visible else {"LOCAL_RANK": str(device)}
