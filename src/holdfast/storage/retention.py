"""What to keep, as small values that can be put together.

    LastN(3) | EveryK(1000) | BestBy("loss", "min", 2)        last:3,every:1000,best:loss:min:2

A checkpoint is kept if one of them says so. Whatever they say, pinned ones are kept, and the newest one that is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from holdfast.errors import UsageError


class RetentionCandidate(Protocol):
    """The facts about a checkpoint by which a policy chooses."""

    @property
    def step(self) -> int:
        """Return the step of the checkpoint."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Return its pins."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Return what was measured at its step."""


class Policy:
    """A rule for which checkpoints to keep."""

    def keeps(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        """Return the steps to keep, each with the reason. Candidates are given newest first."""
        raise NotImplementedError

    def __or__(self, other: Policy) -> AnyOf:
        return AnyOf((*_flat(self), *_flat(other)))


class LastN(Struct, Policy, frozen=True):
    """The policy that keeps the newest ones."""

    count: int

    def keeps(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        why = "the newest" if self.count == 1 else f"one of the last {self.count}"
        return {item.step: why for item in candidates[: self.count]}

    def __str__(self) -> str:
        return f"last:{self.count}"


class EveryK(Struct, Policy, frozen=True):
    """The policy that keeps those whose step is a multiple."""

    steps: int

    def keeps(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        return {item.step: f"a multiple of {self.steps}" for item in candidates if item.step % self.steps == 0}

    def __str__(self) -> str:
        return f"every:{self.steps}"


class BestBy(Struct, Policy, frozen=True):
    """The policy that keeps those with the best value of a metric. Checkpoints without a value never count; of equal
    ones the newer wins."""

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def keeps(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        sign = 1.0 if self.mode == "min" else -1.0
        measured = [(value, item.step) for item in candidates if (value := item.metrics.get(self.metric)) is not None]
        best = sorted(measured, key=lambda pair: (sign * pair[0], -pair[1]))[: self.count]
        why = "is the best" if self.count == 1 else f"is one of the {self.count} best"
        return {step: f"{self.metric} {value:g} {why}" for value, step in best}

    def __str__(self) -> str:
        return f"best:{self.metric}:{self.mode}:{self.count}"


class Everything(Struct, Policy, frozen=True):
    """The policy that keeps all."""

    def keeps(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        return {item.step: "all are kept" for item in candidates}

    def __str__(self) -> str:
        return "all"


class Tagged(Struct, Policy, frozen=True):
    """The policy that keeps pinned ones."""

    def keeps(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        return {item.step: f"pinned as {', '.join(item.tags)}" for item in candidates if item.tags}

    def __str__(self) -> str:
        return "tagged"


class AnyOf(Struct, Policy, frozen=True):
    """The policy that keeps what any of several policies keeps."""

    policies: tuple[Policy, ...]

    def keeps(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        kept: dict[int, str] = {}
        for policy in self.policies:
            kept = policy.keeps(candidates) | kept
        return kept

    def __str__(self) -> str:
        return ",".join(str(policy) for policy in self.policies)


def parse_policy(text: str) -> Policy:
    """Return the policy that a text like last:3,every:1000,best:loss:min:2 describes."""
    policies = [_parse(rule.strip()) for rule in text.split(",") if rule.strip()]
    if not policies:
        raise UsageError(f"{text!r} keeps nothing: write for example last:3,every:1000,best:loss:min:2")
    return policies[0] if len(policies) == 1 else AnyOf(tuple(policies))


def _parse(rule: str) -> Policy:
    match rule.split(":"):
        case ["last", count]:
            return LastN(_positive(count, rule))
        case ["every", steps]:
            return EveryK(_positive(steps, rule))
        case ["best", metric, ("min" | "max") as mode] if metric:
            return BestBy(metric, mode)
        case ["best", metric, ("min" | "max") as mode, count] if metric:
            return BestBy(metric, mode, _positive(count, rule))
        case ["all"]:
            return Everything()
        case ["tagged"]:
            return Tagged()
        case _:
            raise UsageError(f"{rule!r:.80} is not a policy: use last:N, every:K, best:METRIC:min|max[:N], tagged, all")


def _positive(text: str, rule: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UsageError(f"{rule!r:.80}: {text!r:.40} must be an integer above 0")
    return int(text)


def _flat(policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)
