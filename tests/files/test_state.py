"""Names are matched to the model's, and what does not fit is said."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.files.state import find_states, fit_weights, match_names


def net(inner: int = 4) -> nn.Module:
    return nn.Sequential(
        OrderedDict(stem=nn.Linear(4, inner), norm=nn.BatchNorm1d(inner), head=nn.Linear(inner, 2))
    )


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "module.",
        "_orig_mod.",
        "module._orig_mod.",
        "_orig_mod.module.",
        "module.module.",
        "model.",
        "module.model.",
        "model._orig_mod.module.",
        "net.backbone.",
        "_fsdp_wrapped_module.",
        "lightning_model.module.net.",
    ],
)
def test_prefixes(prefix: str) -> None:
    source, target = net(), net()
    _, notes = fit_weights(target, prefixed(source.state_dict(), prefix), where="f")
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value)
    assert bool(notes) == bool(prefix)


def test_wrappers_inside_names() -> None:
    source, target = net(), net()
    state = {name.replace(".", "._orig_mod.", 1): v for name, v in source.state_dict().items()}
    fit_weights(target, state, where="f")
    assert torch.equal(target.stem.weight, source.stem.weight)


def test_a_prefix_is_added_where_the_model_has_one() -> None:
    target = nn.ModuleDict({"bert": net()})
    source = net()
    _, notes = fit_weights(target, source.state_dict(), where="f")
    assert torch.equal(target["bert"].stem.weight, source.stem.weight)
    assert notes == ("prefix bert. added to the names",)


def test_names_that_match_are_left_alone() -> None:
    """A model may itself have a part called module."""
    wanted = frozenset({"module.a", "module.b"})
    assert match_names(["module.a", "module.b"], wanted) == (["module.a", "module.b"], ())
    assert match_names(["x.a", "x.b"], frozenset({"c"})) == (["x.a", "x.b"], ())


def test_two_names_are_never_made_one() -> None:
    names = ["module.a", "a", "module.b"]
    assert match_names(names, frozenset({"a", "b"}))[0] == names


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda s: s, ""),
        (lambda s: {"state_dict": s, "epoch": 3}, "key 'state_dict'"),
        (lambda s: {"model": {"weights": s}, "optim": {"state": {0: {"m": torch.zeros(2)}}}}, None),
        (lambda s: {"anything": s, "scaler": {"scale": torch.ones(1)}}, "key 'anything'"),
        (lambda s: {"ema": s, "model": s, "state_dict": s}, "key 'state_dict'"),
        (lambda s: OrderedDict(net=OrderedDict(s)), "key 'net'"),
    ],
)
def test_where_the_weights_are_found(make: Any, place: str | None) -> None:
    source, target = net(), net()
    found, _ = fit_weights(target, make(source.state_dict()), where="f")
    assert torch.equal(target.head.weight, source.head.weight)
    assert place is None or found == place


def test_other_weights_in_the_file_are_said() -> None:
    state = net().state_dict()
    _, notes = fit_weights(net(), {"ema": state, "model": state}, where="f")
    assert notes == ("other weights in the file, not used: ema",)


def test_parts_of_a_model_are_put_together() -> None:
    source, target = net(), net()
    parts = {name: getattr(source, name).state_dict() for name in ("stem", "norm", "head")}
    fit_weights(target, {"parts": parts}, where="f")
    assert torch.equal(target.norm.running_var, source.norm.running_var)
    assert len(list(find_states(parts))) == 4


def test_missing_weights_are_an_error_unless_allowed() -> None:
    state = net().state_dict()
    del state["head.weight"], state["stem.bias"]
    with pytest.raises(CheckpointError) as caught:
        fit_weights(net(), state, where="f")
    assert "2 of 9 weights are missing: stem.bias, head.weight" in caught.value.found
    assert "--allow-missing" in caught.value.fix
    _, notes = fit_weights(net(), state, where="f", allow_missing=True)
    assert notes == ("missing, left at their random start: stem.bias, head.weight",)


def test_long_lists_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    with pytest.raises(CheckpointError, match="and 11 more"):
        fit_weights(model, {"0.weight": torch.zeros(1, 1)}, where="f")


def test_unexpected_weights_are_said() -> None:
    _, notes = fit_weights(net(), {**net().state_dict(), "extra": torch.ones(1)}, where="f")
    assert notes == ("not in the model, left out: extra",)


def test_nothing_matched() -> None:
    with pytest.raises(CheckpointError, match="weights of another model, such as a, b"):
        fit_weights(net(), {"a": torch.ones(1), "b": torch.ones(1)}, where="f")


def test_shapes_that_differ() -> None:
    before = net(4)
    kept = {name: value.clone() for name, value in before.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        fit_weights(before, net(5).state_dict(), where="f")
    assert "stem.weight: (5, 4) in the file, (4, 4) in the model" in caught.value.found
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in kept.items())


def test_a_tied_weight_may_be_missing_under_one_name() -> None:
    model = net()
    model.add_module("copy", model.head)
    state = {name: v for name, v in model.state_dict().items() if not name.startswith("copy")}
    _, notes = fit_weights(model, state, where="f")
    assert notes == ()


def test_old_batch_norms_lack_a_counter() -> None:
    state = {k: v for k, v in net().state_dict().items() if "num_batches" not in k}
    _, notes = fit_weights(net(), state, where="f")
    assert notes == ()


def test_another_dtype_is_said() -> None:
    state = {k: v.half() if v.is_floating_point() else v for k, v in net().state_dict().items()}
    _, notes = fit_weights(net(), state, where="f")
    assert notes == ("weights are float16 in the file, float32 in the model",)
