"""Pictures of the answers, as SVG or as an HTML page that holds it: no library, no network, no script.

course      the share of the fleet that trained and that was in repair, through the time of one run
where       for each scenario: where the machines' time went, beside the work that counts
spares      the job's rate, and the goodput with spares charged, by the number of spares
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from holdfast.sim.answers import Answer, Question, VariantOutcome, duration
from holdfast.sim.simulation import SimulatedRun
from holdfast.sim.time_ledger import TRAINING

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 330, 150, 30, 46, 52
INK, FAINT, GRID = "#1f2933", "#616e7c", "#d9dee4"
BAR_HEIGHT_MAX = 60
PALETTE = ("#2f6f9f", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#c17c3a", "#5b7f95", "#a0a0a0")
OTHERS = "#c8ced6"
COLOURED_MAX = len(PALETTE)
TITLES = {
    Question.GOODPUT: "Where the machines' time went",
    Question.SPARES: "Spares: what the job gains, and what they cost",
    Question.NINES: "Spares: what the job gains, and what they cost",
    Question.CADENCE: "Checkpoints: where the machines' time went, by the time between two",
    Question.STRATEGY: "Strategies: where the machines' time went",
}


def svg(answers: Sequence[Answer], course: SimulatedRun) -> str:
    """Return one picture with a panel for each answer, below the course of a run."""
    panels = [_course(course)]
    shown = set()
    for answer in answers:
        if (title := TITLES[answer.question]) not in shown:
            shown.add(title)
            panels.append(_spares(answer, title) if title == TITLES[Question.SPARES] else _where(answer, title))
    height = PANEL_HEIGHT * len(panels)
    body = "".join(f'<g transform="translate(0 {PANEL_HEIGHT * i})">{panel}</g>' for i, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>{body}</svg>'
    )


def html(answers: Sequence[Answer], course: SimulatedRun, command: str) -> str:
    """Return a page with the sentences and the picture."""
    sentences = "".join(f"<p><b>{a.question.value}</b>: {escape(a.sentence)}.</p>" for a in answers)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>holdfast sim</title><style>'
        "body{font:15px/1.5 Helvetica,Arial,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#1f2933}"
        "code{background:#f1f3f5;padding:.2em .4em}svg{max-width:100%;height:auto}</style></head><body>"
        f"<h1>holdfast sim</h1><p><code>{escape(command)}</code></p>{sentences}{svg(answers, course)}</body></html>"
    )


# --- panels


def _course(run: SimulatedRun) -> str:
    low = _floor(run.training_course)
    plot = _Plot("One run: what the fleet did", (0.0, run.days), (low, 1.0), "days")
    points = [(run.days * (i + 0.5) / len(run.training_course), y) for i, y in enumerate(run.training_course)]
    whole = [(x, 1.0 - y) for (x, _), y in zip(points, run.repair_course, strict=True)]
    plot.line(points, PALETTE[0])
    plot.line(whole, PALETTE[1], dashed=True)
    plot.legend([("training, of all machines", PALETTE[0]), ("not in repair: the bound", PALETTE[1])])
    return plot.markup()


def _spares(answer: Answer, title: str) -> str:
    outcomes = answer.outcomes
    curves = [[(o.amount, o.job_rate.mean) for o in outcomes], [(o.amount, o.goodput.mean) for o in outcomes]]
    low = _floor([y for curve in curves for _, y in curve])
    plot = _Plot(title, (0.0, max(o.amount for o in outcomes) or 1.0), (low, 1.0), "spare machines")
    for curve, colour in zip(curves, PALETTE, strict=False):
        plot.line(curve, colour, dots=True)
    names = ["the job's rate, of its full speed", "goodput of all machines, spares charged"]
    plot.legend(list(zip(names, PALETTE, strict=False)))
    return plot.markup()


def _where(answer: Answer, title: str) -> str:
    """Return bars of lost time. Work that counts is left out of them, and written beside them."""
    outcomes = answer.outcomes
    names = _largest(outcomes)
    colours = dict(zip(names, PALETTE, strict=False))
    most = max(1.0 - one.accounts.get(TRAINING, 0.0) for one in outcomes) or 1.0
    plot = _Plot(
        title, (0.0, 100.0 * most), (0.0, 1.0), "% of all machines' time that is no work that counts", bare=True
    )
    height = min((PANEL_HEIGHT - TOP - BOTTOM - 40) / max(len(outcomes), 1), BAR_HEIGHT_MAX)
    for index, one in enumerate(outcomes):
        y = TOP + 40 + index * height + 0.15 * height
        plot.text(LEFT - 8, y + 0.4 * height, _row_label(answer, one), anchor="end")
        at = 0.0
        lost = [(name, share) for name, share in one.accounts.items() if name != TRAINING]
        rest = sum(share for name, share in lost if name not in colours)
        for name, share in [*((n, one.accounts.get(n, 0.0)) for n in names), ("others", rest)]:
            plot.bar(100.0 * at, 100.0 * (at + share), y, 0.6 * height, colours.get(name, OTHERS))
            at += share
        plot.text(plot.x(100.0 * at) + 4, y + 0.4 * height, f"{100.0 * one.goodput.mean:.2f} %", colour=FAINT)
    plot.legend([*colours.items(), ("others", OTHERS)])
    return plot.markup()


def _largest(outcomes: Iterable[VariantOutcome]) -> list[str]:
    """Return the accounts that take most time, apart from work that counts."""
    sums: dict[str, float] = {}
    for one in outcomes:
        for name, share in one.accounts.items():
            sums[name] = sums.get(name, 0.0) + share
    sums.pop(TRAINING, None)
    return sorted(sums, key=lambda name: -sums[name])[:COLOURED_MAX]


def _row_label(answer: Answer, one: VariantOutcome) -> str:
    return duration(one.amount) if answer.question is Question.CADENCE else one.label


def _floor(values: Iterable[float]) -> float:
    """Return where an axis of shares begins, so that what is close to 1 can be told apart."""
    least = min(values, default=0.0)
    return next((low for low in (0.99, 0.95, 0.9, 0.8, 0.5) if least >= low), 0.0)


class _Plot:
    """A panel with its axes."""

    def __init__(
        self,
        title: str,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        x_title: str,
        *,
        bare: bool = False,
    ) -> None:
        self._x_range, self._y_range = x_range, y_range
        self._parts: list[str] = []
        self.text(LEFT, 22, title, size=15)
        self.text((LEFT + WIDTH - RIGHT) / 2, PANEL_HEIGHT - 12, x_title, anchor="middle", colour=FAINT)
        for value in _ticks(*x_range):
            self._grid(self.x(value), TOP + 20, self.x(value), PANEL_HEIGHT - BOTTOM)
            self.text(self.x(value), PANEL_HEIGHT - BOTTOM + 16, f"{value:g}", anchor="middle", colour=FAINT)
        for value in () if bare else _ticks(*y_range):
            self._grid(LEFT, self.y(value), WIDTH - RIGHT, self.y(value))
            self.text(LEFT - 8, self.y(value) + 4, f"{100.0 * value:g} %", anchor="end", colour=FAINT)

    def x(self, value: float) -> float:
        low, high = self._x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT - 60)

    def y(self, value: float) -> float:
        low, high = self._y_range
        top, bottom = TOP + 20, PANEL_HEIGHT - BOTTOM
        return bottom - (max(value, low) - low) / (high - low) * (bottom - top)

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False, dots: bool = False
    ) -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        for x, y in points if dots else ():
            self._parts.append(f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{colour}"/>')

    def bar(self, start: float, end: float, y: float, height: float, colour: str) -> None:
        left, width = self.x(start), self.x(end) - self.x(start)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, size: int = 12) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text {place} fill="{colour}" font-size="{size}">{escape(text)}</text>')

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        x, y = float(LEFT), float(TOP - 6)
        for name, colour in entries:
            width = 24 + 6.4 * len(name)
            if x + width > WIDTH - RIGHT:
                x, y = float(LEFT), y + 16
            self._parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>')
            self.text(x + 14, y, name, colour=FAINT)
            x += width

    def markup(self) -> str:
        return "".join(self._parts)

    def _grid(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}" stroke-width="1"/>'
        )


def _ticks(low: float, high: float) -> list[float]:
    """Return round values between two others, about five."""
    span = high - low
    size = 10.0 ** math.floor(math.log10(span))
    step = next((size * times for times in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (size * times) <= 6.0), size)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
