"""Environment variables that agent and worker both know by name.

torchrun gives every worker TORCH_NCCL_ASYNC_ERROR_HANDLING=1, and so does Holdfast's agent: a script without a session
needs torch's watchdog to end it when a collective fails. A session needs it off (worker/collectives/watchdogs.py),
unless the user has set it. So the agent names the variables that it has set itself.
"""

from __future__ import annotations

SPARE_VARIABLE = "HOLDFAST_SPARE"
"""Set in the environment of a spare, and emptied when it is assigned to a rank."""
PRIVATE_DEVICE_VARIABLE = "HOLDFAST_PRIVATE_DEVICE"
"""Set in the environment of a spare that will see one device only, when it has a rank (--virtual-local-rank)."""
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What a launcher sets for each rank. A spare's environment has none of them."""

RETRIES_VARIABLE = "HOLDFAST_COLLECTIVE_RETRIES"
"""How often a worker may run one collective again below the step (--collective-retries)."""

AGENT_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Variables that an agent sets for its workers where the user has not."""
AGENT_DEFAULTS_VARIABLE = "HOLDFAST_AGENT_DEFAULTS"
"""The names of those that the agent has set, separated by commas."""


def with_agent_defaults(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with our values where the user has set none, and with the names of those."""
    ours = {name: value for name, value in AGENT_DEFAULTS.items() if name not in environment}
    return environment | ours | {AGENT_DEFAULTS_VARIABLE: ",".join(ours)}
