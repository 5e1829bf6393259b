"""What a script's body may switch besides numbers: flags of modules and parameters, hooks, and settings of the process.

    of modules       `training` of each, wrappers included
    of parameters    `requires_grad`
    of DDP           whether its next forward broadcasts the buffers, which follows from its last one: a rank that did
                     not make that one would wait in a broadcast alone
    hooks            forward, backward and their pre-hooks of modules; those of parameters
    of the process   grad mode, default dtype, autocast, deterministic algorithms, precision of matrix products, cuDNN
    plain values     attributes of modules and optimizers that are numbers or words (attributes.py)

All of it is saved before a step and restored when the step is repeated. What the loop has switched for good (a
layer unfrozen at step 500, a part of the model in eval mode) is part of the state: a replacement has not run those
steps. Only what differs from how the script had built it is saved, so most states have nothing of it, and a script that
was edited between two starts keeps its own settings otherwise. Hooks are functions and cannot be handed over; grad mode
and autocast belong to the script's own `with` blocks around a step, and are not handed over either.

A module that got other submodules or parameters inside the loop is refused: a replacement would build the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from holdfast.errors import ScriptError, StateError
from holdfast.state.attributes import Attributes, Values
from holdfast.state.modules import unwrapped
from holdfast.torch_compat import MODULE_HOOKS, PARAMETER_HOOKS, children_of, set_grad_enabled, tensors_held

SYNCS_BUFFERS = "require_forward_param_sync"
"""DDP's attribute; public, though not documented."""

_OF_BLOCKS = ("grad_mode", "autocast")
"""How the names of settings begin that `with` blocks of the script set around a step."""


class Setting(NamedTuple):
    """A setting of the process."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _autocast(device: str) -> dict[str, Setting]:
    return {
        f"autocast_{device}": Setting(
            lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)
        ),
        f"autocast_dtype_{device}": Setting(
            lambda: torch.get_autocast_dtype(device), lambda value: torch.set_autocast_dtype(device, value)
        ),
    }


def _settings() -> dict[str, Setting]:
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    found = {
        "grad_mode": Setting(torch.is_grad_enabled, set_grad_enabled),
        "default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": Setting(torch.are_deterministic_algorithms_enabled, _set_deterministic),
        "deterministic_warn_only": Setting(torch.is_deterministic_algorithms_warn_only_enabled, _set_warn_only),
        "matmul_precision": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "autocast_cache": Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        **_autocast("cpu"),
    }
    if accelerator is not None:
        found |= _autocast(accelerator.type)
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        found |= {f"cudnn_{name}": _attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
        names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        found |= {f"cuda_matmul_{name}": _attribute(matmul, name) for name in names}
        found |= {"cudnn_allow_tf32": _attribute(cudnn, "allow_tf32")}
    return {name: setting for name, setting in found.items() if _is_readable(setting)}


def _set_deterministic(is_on: bool) -> None:
    torch.use_deterministic_algorithms(is_on, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_warn_only(is_on: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=is_on)


def _is_readable(setting: Setting) -> bool:
    try:
        setting.get()
    except RuntimeError:  # torch refuses to tell where a script uses both the old and the new names of a setting
        return False
    return True


@dataclass(frozen=True, slots=True)
class SavedFlags:
    """All flags at one moment."""

    training: list[bool]
    requires_grad: list[bool]
    syncs_buffers: list[bool]
    process: dict[str, Any]
    module_hooks: dict[int, dict[Any, Any]]
    """id() of a dictionary of hooks → what was in it. Empty ones are left out."""
    parameter_hooks: dict[tuple[int, str], dict[Any, Any]]
    attributes: dict[str, Values]


class Flags:
    """The flags of tracked modules and of this process."""

    def __init__(self) -> None:
        self._settings = _settings()
        self.attributes = Attributes()
        self._modules: dict[str, Module] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._wrappers: dict[str, Module] = {}
        """Those that broadcast buffers."""
        self._hook_holders: list[dict[Any, Any]] = []
        self._structure: tuple[list[Module | None], int] = ([], 0)
        """The children of all modules, and how many parameters these have: what must not change in the loop."""
        self._built: SavedFlags | None = None
        """How the script had made them before its first step."""
        self._loaded: Mapping[str, Any] | None = None
        """The flags that were loaded before that; they are set then."""

    def refresh(
        self, modules: Mapping[str, Module], optimizers: Mapping[str, object] | None = None, local: Iterable[str] = ()
    ) -> None:
        """Look for modules and parameters again. In the loop they must be those of before. `local`: the names of those
        that each rank has for itself."""
        if self._built is not None:
            self._check_structure()
            return
        found: dict[int, tuple[str, Module]] = {}
        parameters: dict[int, tuple[str, torch.Tensor]] = {}
        for name, module in modules.items():
            inner = unwrapped(module)
            for path, part in inner.named_modules():
                found.setdefault(id(part), (f"{name}.{path}" if path else name, part))
            for path, part in module.named_modules():
                found.setdefault(id(part), (f"{name}@{path}", part))  # what wraps it
            for path, parameter in inner.named_parameters():
                parameters.setdefault(id(parameter), (f"{name}.{path}", parameter))
        self._modules = dict(found.values())
        self._parameters = dict(parameters.values())
        self._wrappers = {name: module for name, module in self._modules.items() if hasattr(module, SYNCS_BUFFERS)}
        self._hook_holders = [vars(part)[kind] for part in self._modules.values() for kind in MODULE_HOOKS]
        self._structure = self._look_at_structure()
        holders = {name: module for name, module in self._modules.items() if "@" not in name} | dict(optimizers or {})
        roots = set(local)
        self.attributes.refresh(holders, (name for name in holders if name.partition(".")[0] in roots))

    def capture(self) -> SavedFlags:
        """Save all flags."""
        self._check_structure()
        return SavedFlags(
            [module.training for module in self._modules.values()],
            [parameter.requires_grad for parameter in self._parameters.values()],
            [getattr(wrapper, SYNCS_BUFFERS) for wrapper in self._wrappers.values()],
            {name: setting.get() for name, setting in self._settings.items()},
            {id(holder): dict(holder) for holder in self._hook_holders if holder},
            {
                (id(parameter), kind): dict(hooks)
                for parameter in self._parameters.values()
                for kind in PARAMETER_HOOKS
                if (hooks := getattr(parameter, kind))
            },
            self.attributes.capture(),
        )

    def restore(self, saved: SavedFlags) -> None:
        """Put all of it back."""
        self.attributes.restore(saved.attributes)
        self._put(saved.training, saved.requires_grad, saved.syncs_buffers, saved.process)
        for holder in self._hook_holders:
            _put_hooks(holder, saved.module_hooks.get(id(holder), {}))
        for parameter in self._parameters.values():
            for kind in PARAMETER_HOOKS:
                if (hooks := getattr(parameter, kind)) is not None:
                    _put_hooks(hooks, saved.parameter_hooks.get((id(parameter), kind), {}))

    def _look_at_structure(self) -> tuple[list[Module | None], int]:
        children = [child for module in self._modules.values() for child in children_of(module).values()]
        return children, sum(len(tensors_held(module)[0]) for module in self._modules.values())

    def _check_structure(self) -> None:
        if self._look_at_structure() == self._structure:
            return
        known = set(map(id, self._structure[0]))
        changed = [
            name
            for name, module in self._modules.items()
            if any(id(child) not in known for child in children_of(module).values())
        ]
        raise ScriptError(
            f"{', '.join(changed) or 'a tracked module'} has other submodules or parameters than when it was tracked: a"
            " replacement worker would not have them. Build the whole model before job.track, and switch parts of it on"
            " with requires_grad_()"
        )

    def begin(self) -> None:
        """Start watching: the script is about to make its first step, and what it switches from now on is part of the
        state."""
        self._built = self.capture()
        self.attributes.begin()
        if self._loaded is not None:
            self.load(self._loaded)

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return what differs from how the script had built it, by name: part of the state."""
        if self._built is None:
            return {kind: dict(values) for kind, values in self._loaded.items()} if self._loaded else {}
        built = self._built
        training = (module.training for module in self._modules.values())
        required = (parameter.requires_grad for parameter in self._parameters.values())
        syncs_buffers = (getattr(wrapper, SYNCS_BUFFERS) for wrapper in self._wrappers.values())
        process = {name: setting.get() for name, setting in self._settings.items() if not name.startswith(_OF_BLOCKS)}
        found = {
            "training": _differing(self._modules, training, built.training),
            "requires_grad": _differing(self._parameters, required, built.requires_grad),
            "syncs_buffers": _differing(self._wrappers, syncs_buffers, built.syncs_buffers),
            "process": {name: value for name, value in process.items() if value != built.process[name]},
            "attributes": self.attributes.changed(),
            "of_each_rank": dict.fromkeys(sorted(self.attributes.of_each_rank), True),
        }
        return {kind: values for kind, values in found.items() if values}

    def known_of(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what flags of another layout say of the modules here: other stages and wrappers are left out."""
        here: dict[str, Mapping[str, object]] = {
            "training": self._modules,
            "requires_grad": self._parameters,
            "syncs_buffers": self._wrappers,
        }
        return {
            kind: {name: is_on for name, is_on in values.items() if name in here[kind]} if kind in here else values
            for kind, values in saved.items()
        }

    @property
    def has_unfrozen(self) -> bool:
        """Return whether a parameter requires a gradient that did not before the first step."""
        pairs = zip(self._parameters.values(), self._built.requires_grad if self._built else (), strict=False)
        return any(parameter.requires_grad and not was for parameter, was in pairs)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Make the flags what they were when `changed()` was asked: as built, but for what is named."""
        if self._built is None:
            self._loaded = saved  # the script may still switch something before its first step
            return
        self._loaded = None
        self.attributes.of_each_rank |= set(saved.get("of_each_rank", ()))
        self.attributes.load(saved.get("attributes", {}))
        process = {**self._built.process, **saved.get("process", {})}
        training, required = saved.get("training", {}), saved.get("requires_grad", {})
        syncs_buffers = saved.get("syncs_buffers", {})
        kinds = ((training, self._modules), (required, self._parameters), (syncs_buffers, self._wrappers))
        for names, known in kinds:
            if unknown := [name for name in names if name not in known]:
                raise StateError(f"{unknown[0]} was switched when the state was saved, and is not in the model now")
        self._put(
            [training.get(name, was) for name, was in zip(self._modules, self._built.training, strict=True)],
            [required.get(name, was) for name, was in zip(self._parameters, self._built.requires_grad, strict=True)],
            [syncs_buffers.get(name, was) for name, was in zip(self._wrappers, self._built.syncs_buffers, strict=True)],
            {name: value for name, value in process.items() if not name.startswith(_OF_BLOCKS)},
        )

    def _put(
        self,
        training: Iterable[bool],
        requires_grad: Iterable[bool],
        syncs_buffers: Iterable[bool],
        process: Mapping[str, Any],
    ) -> None:
        for wrapper, is_on in zip(self._wrappers.values(), syncs_buffers, strict=True):
            setattr(wrapper, SYNCS_BUFFERS, is_on)
        for module, is_on in zip(self._modules.values(), training, strict=True):
            if module.training != is_on:
                module.training = is_on
        for parameter, is_on in zip(self._parameters.values(), requires_grad, strict=True):
            if parameter.requires_grad != is_on:
                parameter.requires_grad_(is_on)
        for name, value in process.items():
            if name in self._settings and self._settings[name].get() != value:
                self._settings[name].put(value)


def _differing(named: Mapping[str, Any], now: Iterable[bool], built: Iterable[bool]) -> dict[str, bool]:
    return {name: is_on for name, is_on, was in zip(named, now, built, strict=True) if is_on != was}


def _put_hooks(holder: dict[Any, Any], saved: dict[Any, Any]) -> None:
    if holder != saved:
        holder.clear()
        holder.update(saved)
