"""The trees of several shards as one: a stage of a pipeline has other names than another.

    modules       the names of all shards
    optimizers    the state of all parameters, by their names; groups with the same settings are one group
    flags         the names of all shards
    others        as the first shard has them that has them at all; they are the same on every rank

What is in several shards is taken from the first of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from holdfast.errors import StateError
from holdfast.state.tracked import FLAGS, GRADIENTS, TRANSIENT

Label = str | int
"""The name of a parameter, or the number of one that is in no tracked module."""


def union_of(trees: Sequence[Any], modules: Collection[str], optimizers: Collection[str]) -> dict[str, Any]:
    """Return one tree with all that the trees have; `modules` and `optimizers` are the branches that are such."""
    union: dict[str, Any] = {}
    for tree in trees:
        if not isinstance(tree, dict):
            raise StateError("what was saved is not the state of tracked objects")
        for name, branch in tree.items():
            if name not in union:
                union[name] = branch
            elif name in modules:
                union[name] = _joined(union[name], branch, levels=1)
            elif name in (TRANSIENT, FLAGS):
                union[name] = _joined(union[name], branch, levels=2)
            elif name in optimizers:
                union[name] = _joined_optimizers(union[name], branch, name)
    names = [frozenset((name, key) for name in modules for key in tree.get(name, ())) for tree in trees]
    if GRADIENTS in union and any(one != names[0] for one in names):
        raise StateError(
            "gradients in accumulation are saved by the order of parameters, which differs between the stages of a"
            " pipeline: load them in the layout that they were saved in, or save after an update"
        )
    return union


def _joined(one: Any, other: Any, levels: int) -> Any:
    """Return a dictionary with the keys of both."""
    if one is other or not isinstance(one, dict) or not isinstance(other, dict):
        return one
    joined = {**one, **{key: value for key, value in other.items() if key not in one}}
    if levels > 1:
        joined |= {key: _joined(one[key], other[key], levels - 1) for key in one if key in other}
    return joined


def _joined_optimizers(one: Any, other: Any, path: str) -> Any:
    if not is_of_groups(one) or not is_of_groups(other):
        return one
    labels, others = (_labels(saved) for saved in (one, other))
    if labels == others:
        state = {label: _joined(entry, other["state"].get(label), levels=1) for label, entry in one["state"].items()}
        return {**one, "state": _joined(state, other["state"], levels=1)}
    if numbers := [label for label in (*labels, *others) if not isinstance(label, str)]:
        raise StateError(
            f"{path} has parameters that are in no tracked module (number {numbers[0]}), and other parameters on other"
            " shards: track the modules they belong to"
        )
    groups = [dict(group) for group in one["param_groups"]]
    used: set[int] = set()
    for index, group in enumerate(other["param_groups"]):
        found = _same_group(groups, group, index, used)
        if found is None:
            groups.append(dict(group))
            found = len(groups) - 1
        else:
            known = set(groups[found]["params"])
            added = [label for label in group["params"] if label not in known]
            groups[found]["params"] = [*groups[found]["params"], *added]
        used.add(found)
    return {**one, "state": _joined(one["state"], other["state"], levels=1), "param_groups": groups}


def _same_group(groups: Sequence[dict[str, Any]], group: dict[str, Any], index: int, used: set[int]) -> int | None:
    """Return which group another shard's group belongs to: one with parameters in common, else one with the same
    settings, at the same place if it has them."""
    labels = set(group["params"])
    order = [index, *range(len(groups))] if index < len(groups) else list(range(len(groups)))
    for at in order:
        if labels.intersection(groups[at]["params"]):
            return at
    return next((at for at in order if at not in used and has_same_settings(groups[at], group)), None)


def has_same_settings(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two groups have the same settings, as far as that is known without reading tensors."""
    return bool(_outline({**one, "params": []}) == _outline({**other, "params": []}))


def _outline(value: Any) -> Any:
    if (spec := getattr(value, "spec", None)) is not None:
        return (spec.dtype, spec.shape)
    if isinstance(value, dict):
        return {key: _outline(item) for key, item in value.items()}
    return [_outline(item) for item in value] if isinstance(value, list | tuple) else value


def is_of_groups(saved: Any) -> bool:
    """Return whether a branch has the structure of an optimizer of torch's."""
    return (
        isinstance(saved, dict)
        and isinstance(saved.get("state"), dict)
        and isinstance(saved.get("param_groups"), list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in saved["param_groups"])
    )


def _labels(saved: dict[str, Any]) -> list[Label]:
    return [label for group in saved["param_groups"] for label in group["params"]]


def fitted_groups(
    saved: Any, live: Sequence[Sequence[Label]], known: Collection[Label], is_part: bool, path: str
) -> Any:
    """Return the state of an optimizer with its groups as the live one has them, by the names of their parameters.

    `live`: the parameters of the live groups. `known`: the names of all tracked parameters. `is_part`: whether the
    live objects are a part of the model, which need not have all that was saved. Groups that the live optimizer does
    not have follow behind. What does not fit is left as it is, to be refused with its reason when it is loaded.
    """
    if not is_of_groups(saved):
        return saved
    wanted = [_restricted(group, known) if is_part else group for group in saved["param_groups"]]
    home = {label: at for at, group in enumerate(wanted) for label in group["params"]}
    if not all(label in home for group in live for label in group):
        return saved
    taken = {home[label] for group in live for label in group}
    in_live = {label for group in live for label in group}
    if any(label not in in_live for at in taken for label in wanted[at]["params"]):
        return saved
    empty = [at for at, group in enumerate(wanted) if not group["params"] and at not in taken]
    groups = [_group_like(labels, wanted, home, empty, path) for labels in live]
    if None in groups:
        return saved
    groups += [group for at, group in enumerate(wanted) if at not in taken and group["params"]]
    labels = {label for group in groups for label in group["params"]}
    state = {label: entry for label, entry in saved["state"].items() if label in labels or not is_part}
    return {**saved, "state": state, "param_groups": groups}


def _restricted(group: dict[str, Any], known: Collection[Label]) -> dict[str, Any]:
    return {**group, "params": [label for label in group["params"] if label in known or not isinstance(label, str)]}


def _group_like(
    labels: Sequence[Label], wanted: Sequence[dict[str, Any]], home: dict[Label, int], empty: list[int], path: str
) -> Any:
    """Return a group of these parameters, with the settings that they were saved with."""
    places = list(dict.fromkeys(home[label] for label in labels)) or empty[:1]
    if not places:
        return None
    if not labels:
        empty.remove(places[0])
    first = wanted[places[0]]
    for at in places[1:]:
        if not has_same_settings(first, wanted[at]):
            raise StateError(
                f"{path} has {first['params'][0]} and {wanted[at]['params'][0]} in one parameter group, and they were"
                " saved in groups with other settings: make the same groups"
            )
    return {**first, "params": list(labels)}
