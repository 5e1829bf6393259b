"""`holdfast plan`: what the protection of a model on devices costs, from stated bandwidths. Computed, not measured."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.table import Table

from holdfast.cli.options import Format, Output
from holdfast.cli.terminal import Screen, make_table, print_json
from holdfast.core.cost_plan import CostPlan, Model, Rates, plan
from holdfast.core.memory_plan import gib
from holdfast.errors import UsageError

NUMBER_MIN, STATE_BYTES_MAX = 1e-6, 1e18
RANKS_MAX = 1_000_000
COMPUTED = "Computed from the rates named below, not measured; `holdfast doctor --device` measures some of them here."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan_costs)


def plan_costs(
    state_bytes: Annotated[
        float, typer.Argument(metavar="BYTES", help="Parameters and optimizer: 12 bytes a parameter with Adam.")
    ],
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", help="Devices of the whole job.")] = 8,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", metavar="N", help="Devices of a node.")] = 8,
    shards: Annotated[
        int, typer.Option("--shards", metavar="N", help="Parts of the state: 1 DDP, fewer than ranks HSDP; 0 FSDP2.")
    ] = 0,
    step_s: Annotated[float, typer.Option("--step", metavar="SECONDS", help="How long a step takes.")] = 1.0,
    host_link: Annotated[float, typer.Option(metavar="BYTES", help="Device to host, a second.")] = Rates().host_link,
    host_copy: Annotated[float, typer.Option(metavar="BYTES", help="Within the host, a second.")] = Rates().host_copy,
    gloo: Annotated[float, typer.Option(metavar="BYTES", help="Between ranks over TCP, a second.")] = Rates().gloo,
    output: Output = Format.TEXT,
) -> None:
    """Compute what protecting a model on devices takes: host memory, time a step, time of a recovery."""
    numbers = {
        "BYTES": state_bytes,
        "--step": step_s,
        "--host-link": host_link,
        "--host-copy": host_copy,
        "--gloo": gloo,
    }
    for name, number in numbers.items():
        if not NUMBER_MIN <= number <= STATE_BYTES_MAX:
            raise UsageError(f"{name} {number:g} cannot be: give a number from {NUMBER_MIN:g} to {STATE_BYTES_MAX:g}")
    if not (1 <= ranks <= RANKS_MAX and 1 <= ranks_per_node <= RANKS_MAX and 0 <= shards <= ranks):
        raise UsageError("--ranks and --ranks-per-node are at least 1, --shards at most the number of ranks")
    model = Model(
        state_bytes=state_bytes, ranks=ranks, ranks_per_node=ranks_per_node, shards=shards or ranks, step_s=step_s
    )
    rates = Rates(host_link=host_link, host_copy=host_copy, gloo=gloo)
    plans = [plan(model, rates)] if model.has_twins else [plan(model, rates), plan(model, rates, copies=1)]
    if output is Format.JSON:
        print_json(
            {"model": msgspec.to_builtins(model), "rates": msgspec.to_builtins(rates), "plans": [*map(_row, plans)]}
        )
        return
    screen = Screen()
    screen.print(_table(model, plans))
    screen.print(f"{COMPUTED} Rates: " + ", ".join(f"{k} {v:g}" for k, v in msgspec.to_builtins(rates).items()))


def _row(found: CostPlan) -> object:
    return msgspec.to_builtins(found) | {"recovery_s": found.recovery_s}


def _table(model: Model, plans: list[CostPlan]) -> Table:
    names = ["the default" if not found.copies else f"--replicas {found.copies}" for found in plans]
    table = make_table("", *names)
    table.add_row("state of a rank", *(gib(model.rank_bytes) for _ in plans))
    table.add_row("host memory of a node", *(gib(found.node_memory_bytes) for found in plans))
    table.add_row(
        "added to each step",
        *(f"{found.step_cost_s:.3f} s ({100 * found.step_cost_s / model.step_s:.1f} %)" for found in plans),
    )
    table.add_row("a snapshot every", *(f"{found.snapshot_every} steps" for found in plans))
    table.add_row("recovery of a killed worker", *(f"{found.recovery_s:.1f} s" for found in plans))
    phases = list(dict.fromkeys(name for found in plans for name, _ in found.recovery))
    for phase in phases:
        times = (dict(found.recovery).get(phase) for found in plans)
        table.add_row(f"  {phase}", *("" if seconds is None else f"{seconds:.1f} s" for seconds in times))
    return table
