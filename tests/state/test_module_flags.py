"""Flags of modules, parameters and the process: put back, kept with the state, and refused where they cannot be."""

import pytest
import torch
from torch import nn

from holdfast.errors import ScriptError, StateError
from holdfast.state.cached_state import CachedState
from holdfast.state.module_flags import Flags
from holdfast.state.tracked import FLAGS, Tracked


def build() -> tuple[nn.Sequential, Tracked]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    tracked = Tracked(model=model, optimizer=torch.optim.Adam(model.parameters()))
    tracked.flags.begin()
    return model, tracked


def test_all_of_it_is_put_back() -> None:
    model, tracked = build()
    kept_hook = model[0].register_forward_hook(lambda *_: None)
    saved = tracked.volatile()
    model.eval()
    model[2].requires_grad_(False)
    kept_hook.remove()
    model[2].register_forward_pre_hook(lambda *_: None)
    model[0].get_parameter("weight").register_hook(lambda gradient: 2 * gradient)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_float32_matmul_precision("medium")
    tracked.restore_volatile(saved)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert len(model[0]._forward_hooks) == 1 and not model[2]._forward_pre_hooks
    assert not model[0].weight._backward_hooks
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.get_float32_matmul_precision() == "highest"
    kept_hook.remove()
    assert not model[0]._forward_hooks


def test_a_state_has_what_the_loop_has_switched_and_nothing_else() -> None:
    model, tracked = build()
    assert FLAGS not in tracked.tree()
    cached_state = CachedState(tracked)
    cached_state.state()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    assert tracked.tree()[FLAGS] == {"training": {"model.1": False}, "requires_grad": {"model.0.weight": False}}
    assert cached_state.state().skeleton == tracked.state().skeleton
    other, newcomer = build()
    newcomer.load(tracked.state())
    assert [m.training for m in other.modules()] == [m.training for m in model.modules()] == [True, True, False, True]
    assert [p.requires_grad for p in other.parameters()] == [False, True, True, True]
    model[1].train()
    newcomer.load(tracked.state())
    assert other[1].training and not other[0].weight.requires_grad


def test_what_was_loaded_outlives_what_the_script_does_before_its_first_step() -> None:
    model, tracked = build()
    model[1].eval()
    saved = tracked.state()
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    restarted = Tracked(model=other, optimizer=torch.optim.Adam(other.parameters()))
    restarted.load(saved)
    other.train()
    restarted.flags.begin()
    assert not other[1].training and other[2].training
    assert restarted.tree()[FLAGS] == {"training": {"model.1": False}}


def test_a_state_without_flags_leaves_them_as_built() -> None:
    model, tracked = build()
    tree = tracked.tree()
    model.eval()
    tracked.load_tree(tree)
    assert model.training and model[1].training


def test_wrappers_have_flags_too() -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    flags = Flags()
    flags.refresh({"model": wrapped})
    flags.begin()
    wrapped.training = False
    assert flags.changed() == {"training": {"model@": False}}


def test_another_structure_is_refused() -> None:
    model, tracked = build()
    model[1] = nn.Identity()
    with pytest.raises(ScriptError, match="model has other submodules or parameters"):
        tracked.volatile()
    _, other = build()
    with pytest.raises(StateError, match=r"model\.9 was switched"):
        other.flags.load({"training": {"model.9": False}})


def test_a_parameter_that_is_added_is_refused() -> None:
    model, tracked = build()
    model[0].scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ScriptError, match="other submodules or parameters"):
        tracked.volatile()
