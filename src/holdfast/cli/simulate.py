"""`holdfast sim`: what a fleet gets done with its faults, by the production core and simulated machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.cli.options import STATE_DIR_DEFAULT, Format, Output, StateDir
from holdfast.cli.simulation_values import fault_kinds, fault_rate, lemons, length_of_time, repair_times, share
from holdfast.cli.terminal import Screen, make_table, print_json
from holdfast.errors import UsageError
from holdfast.journal import read_entries
from holdfast.observe.jobs import find_journal
from holdfast.sim.answers import Answer, Inquiry, Question, VariantOutcome, duration, percent
from holdfast.sim.charts import html, svg
from holdfast.sim.fault_models import Arrivals, FaultModel
from holdfast.sim.outages import DAY_S, Trace, read_trace
from holdfast.sim.parallel_runs import OnShare, run_all
from holdfast.sim.phase_times import LearnedTimes, PhaseTimes, learn
from holdfast.sim.scenario import CHECKPOINT_EVERY_S, RecoveryPlan, Scenario
from holdfast.sim.simulation import SimulatedRun
from holdfast.sim.time_ledger import TRAINING
from holdfast.util.files import expand_home
from holdfast.util.state_directory import state_directory

NODES_MAX = 200_000
SEEDS_MAX = 1_000
DAYS_MAX = 3_650.0
REPAIR_DEFAULT = "20h:133h"
WEIBULL_SHAPE_MIN, WEIBULL_SHAPE_MAX = 0.1, 10.0
PICTURES = (".html", ".svg")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sim")(simulate)


def _time(help_text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="TIME", help=help_text, rich_help_panel="Durations")
    return option


def simulate(
    nodes: Annotated[int, typer.Option(help="Machines in all, spares included; 0: as many as the trace has.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(help="Devices of a machine.")] = 8,
    spares: Annotated[int, typer.Option(help="Machines that stand by.")] = 0,
    strategy: Annotated[RecoveryPlan, typer.Option(help="How the job answers faults.")] = RecoveryPlan.RECOVER,
    days: Annotated[float, typer.Option(help="How long; 0: as long as the trace, or 30.")] = 0.0,
    nodes_min: Annotated[
        int, typer.Option(help="The fewest machines to work with; 0: 80 % of those with ranks, or all.")
    ] = 0,
    shards: Annotated[int, typer.Option(help="Parts that the state is cut into; 1: each machine has all of it.")] = 1,
    replicas: Annotated[int, typer.Option(help="Copies of each part, where ranks have different ones.")] = 1,
    cordon_limit: Annotated[int | None, typer.Option(help="As of `holdfast run`.")] = None,
    ask: Annotated[list[Question] | None, typer.Option(help="What to answer; several may be given.")] = None,
    target: Annotated[
        float, typer.Option(help="For `--ask spares`: the share of full speed that the job must reach.")
    ] = 0.99,
    seeds: Annotated[int, typer.Option(help="Runs of each scenario, for the confidence intervals.")] = 3,
    processes: Annotated[int, typer.Option(help="At once; 0: one for each processor.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture: FILE.html or FILE.svg.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Faults: a JSON trace, or CSV node,start,end,kind in hours.", rich_help_panel="Faults"
        ),
    ] = None,
    trace_nodes: Annotated[
        int, typer.Option(help="Machines the trace is about; 0: those it names.", rich_help_panel="Faults")
    ] = 0,
    rate: Annotated[
        str, typer.Option(metavar="RATE", help="4/1000/day, or 80/day of all machines.", rich_help_panel="Faults")
    ] = "",
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Instead: a fault of the whole fleet.", rich_help_panel="Faults")
    ] = "",
    weibull: Annotated[
        float, typer.Option(metavar="SHAPE", help="Of the times between faults.", rich_help_panel="Faults")
    ] = 1.0,
    regular: Annotated[bool, typer.Option("--regular", help="At regular times.", rich_help_panel="Faults")] = False,
    bursts: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the faults, in groups of machines.", rich_help_panel="Faults")
    ] = 0.0,
    lemon_words: Annotated[
        str,
        typer.Option("--lemons", metavar="MACHINES:FAULTS", help="Shares: 0.05:0.245.", rich_help_panel="Faults"),
    ] = "",
    repair: Annotated[
        str, typer.Option(metavar="MEDIAN:MEAN", help="How long a machine is away.", rich_help_panel="Faults")
    ] = REPAIR_DEFAULT,
    kinds: Annotated[
        str,
        typer.Option(metavar="WEIGHTS", help="dies=2,silent=1,device=1,process=1,leaves=1.", rich_help_panel="Faults"),
    ] = "",
    from_journal: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="Learn the durations from this job's receipts.", rich_help_panel="Durations"),
    ] = None,
    detect: Annotated[str, _time("Until a failed worker is noticed.")] = "",
    recover: Annotated[str, _time("From a view whose workers are kept to its first step.")] = "",
    fork: Annotated[str, _time("The same where new processes start.")] = "",
    planned: Annotated[str, _time("The same of a change at a step boundary.")] = "",
    restart: Annotated[str, _time("The same where all start again.")] = "",
    park: Annotated[str, _time("Until a machine that joined is ready.")] = "",
    step: Annotated[str, _time("A training step.")] = "",
    checkpoint_every: Annotated[str, _time("Between two checkpoints.")] = "",
    checkpoint_stall: Annotated[str, _time("How long one keeps the training waiting.")] = "",
    relapse: Annotated[str, _time("Until a broken machine that is kept fails again.")] = "",
    state_dir: StateDir = STATE_DIR_DEFAULT,
    output: Output = Format.TEXT,
) -> None:
    """Simulate a fleet: its goodput with spares charged, where the time goes, how many spares to buy.

    The decisions are those of the production policy; machines, faults and durations are simulated.
    """
    if plot and plot.suffix not in PICTURES:
        raise UsageError(
            f"--plot {plot}: pictures are written as .html or .svg; a browser makes any other kind of them"
        )
    found = read_trace(expand_home(trace), trace_nodes) if trace else None
    fleet = _fleet(nodes, spares, found)
    model = _model(fleet, rate, every, weibull, regular, bursts, lemon_words, repair, kinds, found)
    learned = _learned(from_journal, state_dir)
    stated = {
        "detect": detect, "recover": recover, "fork": fork, "planned": planned, "restart": restart, "park": park,
        "step": step, "checkpoint_stall": checkpoint_stall, "relapse": relapse,
    }  # fmt: skip
    flags = {name: (length_of_time(_flag(name), text, may_be_zero=True),) for name, text in stated.items() if text}
    every_s = length_of_time("--checkpoint-every", checkpoint_every) if checkpoint_every else learned.checkpoint_every_s
    scenario = Scenario(
        nodes=fleet,
        spares=spares,
        gpus_per_node=_at_least(1, "--gpus-per-node", gpus_per_node),
        nodes_min=_at_least(0, "--nodes-min", nodes_min),
        plan=strategy,
        days=_days(days, found),
        shards=_at_least(1, "--shards", shards),
        replicas=_at_least(0, "--replicas", replicas),
        cordon_limit=None if cordon_limit is None else _at_least(0, "--cordon-limit", cordon_limit),
        times=msgspec.structs.replace(learned.times, **flags),
        trace=found,
        model=model,
        checkpoint_every_s=every_s or CHECKPOINT_EVERY_S,
    )
    _check(scenario, seeds, processes)
    inquiry = Inquiry(scenario, ask or [Question.GOODPUT], seeds, share("--target", target, may_be_one=True))
    with _progress(len(inquiry.tasks)) as on_share:
        runs = run_all(inquiry.tasks, processes, on_share)
    answers = inquiry.answers(runs)
    if plot:
        _draw(plot, answers, inquiry.first_run(runs))
    if output is Format.JSON:
        print_json(_report(scenario, learned, answers, runs, seeds))
    else:
        _print(scenario, learned, answers, runs, seeds)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _at_least(least: int, flag: str, number: int) -> int:
    if number < least:
        raise UsageError(f"{flag} {number}: give {least} or more")
    return number


def _fleet(nodes: int, spares: int, trace: Trace | None) -> int:
    """Return how many machines there are."""
    fleet = nodes or (trace.nodes if trace else 0)
    if not 1 <= fleet <= NODES_MAX:
        raise UsageError(f"--nodes {nodes}: give the number of machines, 1 to {NODES_MAX}, or a --trace that has them")
    if not 0 <= spares < fleet:
        raise UsageError(f"--spares {spares}: of {fleet} machines at most {fleet - 1} can stand by")
    return fleet


def _model(
    nodes: int,
    rate: str,
    every: str,
    weibull: float,
    regular: bool,
    bursts: float,
    lemon_words: str,
    repair: str,
    kinds: str,
    trace: Trace | None,
) -> FaultModel | None:
    """Return the model of faults that the flags describe; None with a trace."""
    given = [bool(trace), bool(rate), bool(every)]
    if sum(given) != 1:
        raise UsageError("say which faults there are, by one of --trace FILE, --rate 4/1000/day or --every 18m")
    shaped = regular or weibull != 1.0 or bool(bursts or lemon_words or kinds) or repair != REPAIR_DEFAULT
    if trace and shaped:
        raise UsageError(
            "--weibull, --regular, --bursts, --lemons, --repair and --kinds shape --rate or --every; a trace"
            " has its own"
        )
    if trace:
        return None
    if not WEIBULL_SHAPE_MIN <= weibull <= WEIBULL_SHAPE_MAX:
        raise UsageError(f"--weibull {weibull:g}: give a shape from {WEIBULL_SHAPE_MIN:g} to {WEIBULL_SHAPE_MAX:g}")
    if regular and (weibull != 1.0 or bursts):
        raise UsageError("--regular leaves nothing for --weibull and --bursts to say: give one of them")
    per_node_day = fault_rate("--rate", rate, nodes) if rate else DAY_S / length_of_time("--every", every) / nodes
    lemon_nodes, lemon_share = lemons("--lemons", lemon_words) if lemon_words else (0.0, 0.0)
    median_s, mean_s = repair_times("--repair", repair)
    return FaultModel(
        per_node_day=per_node_day,
        arrivals=Arrivals.REGULAR if regular else Arrivals.WEIBULL,
        shape=weibull,
        burst_share=share("--bursts", bursts),
        lemon_nodes=lemon_nodes,
        lemon_share=lemon_share,
        repair_median_s=median_s,
        repair_mean_s=mean_s,
        kinds=fault_kinds("--kinds", kinds),
    )


def _days(days: float, trace: Trace | None) -> float:
    found = days or (trace.span_s / DAY_S if trace else 30.0)
    if not 0.0 < found <= DAYS_MAX:
        raise UsageError(f"--days {days:g}: give the number of days, above 0 and at most {DAYS_MAX:g}")
    return found


def _check(scenario: Scenario, seeds: int, processes: int) -> None:
    if scenario.nodes_min > scenario.working_nodes:
        raise UsageError(f"--nodes-min {scenario.nodes_min}: only {scenario.working_nodes} machines have ranks")
    if not 1 <= seeds <= SEEDS_MAX:
        raise UsageError(f"--seeds {seeds}: give 1 to {SEEDS_MAX}")
    _at_least(0, "--processes", processes)


def _learned(job: str | None, state_dir: Path) -> LearnedTimes:
    """Return the durations in a job's journal; the assumed ones where none is named."""
    if job is None:
        return LearnedTimes(times=PhaseTimes(), found={})
    learned = learn(entry.record for entry in read_entries(find_journal(state_directory(state_dir), job or None)))
    if not learned.found:
        raise UsageError(f"--from-journal {job}: the job has no receipts of incidents, so there is nothing to learn")
    return learned


@contextmanager
def _progress(runs: int) -> Iterator[OnShare]:
    """Show the progress, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{runs} run{'s' * (runs != 1)}", total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _draw(path: Path, answers: list[Answer], course: SimulatedRun) -> None:
    command = " ".join(["holdfast", *sys.argv[1:]])
    text = svg(answers, course) if path.suffix == ".svg" else html(answers, course, command)
    try:
        expand_home(path).write_text(text)
    except OSError as error:
        raise UsageError(f"--plot {path}: the picture cannot be written: {error}") from None


# --- what is printed


def _report(
    scenario: Scenario, learned: LearnedTimes, answers: list[Answer], runs: list[SimulatedRun], seeds: int
) -> object:
    described = msgspec.to_builtins(msgspec.structs.replace(scenario, trace=None))
    rows = [
        {"question": answer.question, "sentence": answer.sentence, "variants": [_row(o) for o in answer.outcomes]}
        for answer in answers
    ]
    speed = {"runs": len(runs), "processor_s": sum(r.processor_s for r in runs), "turns": sum(r.turns for r in runs)}
    ended = [why for run in runs for why in run.why_ended]
    return {
        "scenario": described, "gpus": scenario.nodes * scenario.gpus_per_node, "seeds": seeds,
        "learned": learned.found, "answers": rows, "why_ended": ended, "speed": speed,
    }  # fmt: skip


def _row(outcome: VariantOutcome) -> object:
    return msgspec.to_builtins(outcome) | {"share_of_bound": outcome.share_of_bound}


def _print(
    scenario: Scenario, learned: LearnedTimes, answers: list[Answer], runs: list[SimulatedRun], seeds: int
) -> None:
    screen = Screen()
    gpus = scenario.nodes * scenario.gpus_per_node
    screen.print(
        f"{scenario.nodes} machines with {gpus} devices, {scenario.spares} of them spare, {scenario.days:g} days,"
        f" {seeds} seed{'s' * (seeds != 1)}"
    )
    if learned.found:
        counts = ", ".join(f"{phase} from {count}" for phase, count in sorted(learned.found.items()))
        screen.print(f"durations learned: {counts}; the others are assumed")
    for answer in answers:
        screen.print()
        screen.print(f"{answer.question.value}: {answer.sentence}.")
        screen.print(_where_table(answer) if answer.question is Question.GOODPUT else _compared_table(answer))
    if ended := list(dict.fromkeys(why for run in runs for why in run.why_ended)):
        screen.print()
        screen.print(f"jobs that ended and were started again, for example on {ended[0]}")


def _where_table(answer: Answer) -> object:
    (outcome,) = answer.outcomes
    table = make_table("where the time went", "share of all machines' time")
    for name, part in outcome.accounts.items():
        table.add_row(f"{name}: counts" if name == TRAINING else name, f"{100 * part:.3f} %")
    return table


def _compared_table(answer: Answer) -> object:
    names = {Question.CADENCE: "every", Question.STRATEGY: "strategy"}
    heading = names.get(answer.question, "spares")
    table = make_table(heading, "machines", "goodput, spares charged", "of the bound", "the job's rate", "jobs ended")
    for outcome in answer.outcomes:
        label = duration(outcome.amount) if answer.question is Question.CADENCE else outcome.label
        table.add_row(
            label,
            str(outcome.nodes),
            percent(outcome.goodput),
            f"{100 * outcome.share_of_bound:.2f} %",
            percent(outcome.job_rate),
            f"{outcome.jobs_ended:g}",
        )
    return table
