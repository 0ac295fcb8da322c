"""Fitting to data: a smaller error on data not seen, the source untouched, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration.gatherer import gather, order_of
from bp_convert.counting import recount
from bp_convert.errors import DataError
from bp_convert.fitting import fit_to_data
from bp_convert.graph.walk import walk
from bp_convert.planner import prepare
from bp_convert.surgery import apply_plan
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Plan
from bp_convert.values.settings import Settings
from bp_convert.values.target import Target
from bp_convert.values.tensors import TensorSpec
from tests.search.models import Words, cnn, examples, images, mlp, vectors
from tests.tiny_models import TINY
from tests.tolerances import assert_near

Batches = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]


def _mlp() -> tuple[nn.Module, tuple[TensorSpec, ...], Callable[[int], Tensor]]:
    return mlp(24, 36, 40, 8), (TensorSpec(shape=(24,)),), lambda n: vectors(n, 24)


def _cnn() -> tuple[nn.Module, tuple[TensorSpec, ...], Callable[[int], Tensor]]:
    return cnn(8), (TensorSpec(shape=(3, 12, 12)),), images


def _words() -> tuple[nn.Module, tuple[TensorSpec, ...], Callable[[int], Tensor]]:
    model = Words()
    return model, (), lambda n: (torch.rand(n, 9).square() * 89).long() + 1


MODELS = {"mlp": _mlp, "cnn": _cnn, "words": _words}
EVERY = pytest.mark.parametrize("name", MODELS)


def _planned(
    model: nn.Module, inputs: tuple[TensorSpec, ...], share: float, data: Any = None
) -> Plan:
    target = (Target(quantity="params", value=share),)
    settings = Settings(target=target, inputs=inputs, convert_anyway=True)
    return prepare(model, settings, examples=data).plan


def _full(model: nn.Module, inputs: tuple[TensorSpec, ...]) -> Plan:
    """Return a plan in which every layer is exact."""
    return prepare(
        model, Settings(rank=10**6, inputs=inputs, convert_anyway=True, convert_head=True,
                        layers=({"match": "*", "rank": 10**6},))  # type: ignore[arg-type]
    ).plan  # fmt: skip


@torch.no_grad()
def _error(source: nn.Module, converted: nn.Module, x: Tensor) -> float:
    source, converted = source.eval(), converted.eval()
    expected = source(x)
    return float((converted(x) - expected).norm() / (expected - expected.mean(0)).norm())


def _fitted(model: nn.Module, plan: Plan, x: Tensor) -> tuple[nn.Module, dict[str, float]]:
    done = apply_plan(model, plan).model
    errors, missed = fit_to_data(model, done, plan, examples(x).batches)
    assert missed == {}
    assert errors.keys() == {layer.name for layer in plan.converted}
    return done, errors


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("share", [0.5, 0.3])
def test_the_error_on_data_not_seen_is_less(name: str, share: float) -> None:
    model, inputs, draw = MODELS[name]()
    seen, unseen = draw(192), draw(192)
    plan = _planned(model, inputs, share)
    weights = apply_plan(model, plan).model
    fitted, errors = _fitted(model, plan, seen)
    before, after = _error(model, weights, unseen), _error(model, fitted, unseen)
    assert after < (0.95 if name == "words" else 0.8) * before
    assert all(0 <= error < 1.5 for error in errors.values())
    # Chosen by the data as well it is no worse than chosen by weights and not fitted.
    plan = _planned(model, inputs, share, examples(seen))
    chosen, _ = _fitted(model, plan, seen)
    assert _error(model, chosen, unseen) < before


@EVERY
def test_exact_factors_stay_exact(name: str) -> None:
    model, inputs, draw = MODELS[name]()
    plan = _full(model, inputs)
    before = {n: b.clone() for n, b in model.named_buffers()}
    done, errors = _fitted(model, plan, draw(96))
    assert max(errors.values()) < 1e-3
    assert _error(model, done, draw(32)) < 1e-3
    held = dict(done.named_buffers())
    for key, buffer in before.items():
        if key.endswith(("running_mean", "running_var")):
            assert_near(held[key], buffer, torch.float16)
        elif key in held:
            assert torch.equal(held[key], buffer)


def test_the_reported_error_is_that_of_the_layer_s_output() -> None:
    model, inputs, draw = _mlp()
    x = draw(96)
    plan = _planned(model, inputs, 0.4)
    done, errors = _fitted(model, plan, x)
    for index in (0, 2, 4):
        if str(index) not in errors:
            continue
        with torch.no_grad():
            wanted = model[: index + 1](x)  # type: ignore[index]
            got = done[: index + 1](x)  # type: ignore[index]
        gap = (got - wanted).norm() / (wanted - wanted.mean(0)).norm()
        assert errors[str(index)] == pytest.approx(float(gap), rel=0.05, abs=1e-3)


def test_a_later_layer_makes_up_for_an_earlier_one() -> None:
    """Fitted to what it now gets, not to what the source got."""
    model, inputs, draw = _mlp()
    x, unseen = draw(256), draw(256)
    plan = _planned(model, inputs, 0.3)
    together, _ = _fitted(model, plan, x)
    apart = apply_plan(model, plan).model
    for layer in plan.converted:  # each on its own, in a model that is otherwise whole
        alone = plan.model_copy(
            update={"layers": tuple(
                one if one.name == layer.name or one.action == "kept"
                else one.model_copy(update={"action": "kept", "factors": {}})
                for one in plan.layers
            )}
        )  # fmt: skip
        done = apply_plan(model, alone).model
        fit_to_data(model, done, alone, examples(x).batches)
        twin = done.get_submodule(layer.name)
        apart.get_submodule(layer.name).load_state_dict(twin.state_dict())
    assert _error(model, together, unseen) < _error(model, apart, unseen)


@EVERY
def test_the_mean_of_every_layer_s_output_is_kept(name: str) -> None:
    model, inputs, draw = MODELS[name]()
    x = draw(96)
    plan = _planned(model, inputs, 0.4)
    done, _ = _fitted(model, plan, x)
    weights = apply_plan(model, plan).model
    kept = {}
    for one, key in ((model, "source"), (done, "fitted"), (weights, "weights")):
        kept[key] = _means(one, plan, x)
    for layer in plan.converted:
        if layer.kind in ("LSTM", "Embedding"):
            continue
        want, got = kept["source"][layer.name], kept["fitted"][layer.name]
        if getattr(model.get_submodule(layer.name), "bias", None) is None:
            continue
        scale = float(want.abs().max())
        bound = (2e-2 if name == "cnn" else 2e-3) * scale  # norms settle batch by batch
        assert float((got - want).abs().max()) < bound
        off = float((kept["weights"][layer.name] - want).abs().max())
        assert off > bound  # the negative twin


@torch.no_grad()
def _means(model: nn.Module, plan: Plan, x: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, y: Any) -> None:
            if isinstance(y, Tensor):
                found[name] = (
                    y.flatten(2).mean((0, 2)) if y.dim() == 4 else y.flatten(0, -2).mean(0)
                )

        return hook

    handles = [
        model.get_submodule(layer.name).register_forward_hook(keep(layer.name))
        for layer in plan.converted
    ]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return found


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", TINY)
def test_every_topology_is_fitted_and_the_source_stays(name: str) -> None:
    tiny = TINY[name]
    model = tiny.make().train()
    first = next(iter(model.children()))
    first.eval()
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    flags = [m.training for m in model.modules()]
    before, state = _state(model), torch.get_rng_state()
    batches = [tiny.inputs(8) for _ in range(3)]
    held = [[t.clone() for t in args] for args, _ in batches]
    plan = prepare(model, Settings(rank=2, convert_anyway=True, convert_head=True)).plan
    done = apply_plan(model, plan).model
    modes = [m.training for m in done.modules()]
    torch.set_rng_state(state)
    errors, missed = fit_to_data(model, done, plan, batches)
    assert torch.equal(torch.get_rng_state(), state)
    assert errors.keys() | missed.keys() == {layer.name for layer in plan.converted}
    assert all(0 <= error < 2 for error in errors.values())
    after = _state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert [m.training for m in model.modules()] == flags
    assert [m.training for m in done.modules()] == modes
    assert _hooks(model) == _hooks(done) == 0
    for (args, _), kept in zip(batches, held, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(args, kept, strict=True))
    for key, parameter in done.named_parameters():
        assert bool(torch.isfinite(parameter).all()), key
        assert parameter.grad is None
    wanted = {n: p.requires_grad for n, p in apply_plan(model, plan).model.named_parameters()}
    assert {n: p.requires_grad for n, p in done.named_parameters()} == wanted
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    twins = [done.get_submodule(layer.name) for layer in plan.converted]
    assert not storages & {
        p.untyped_storage().data_ptr() for twin in twins for p in twin.parameters()
    }


def test_it_is_the_same_every_time() -> None:
    model, inputs, draw = _cnn()
    x = draw(64)
    plan = _planned(model, inputs, 0.4)
    one, two = _fitted(model, plan, x)[0], _fitted(model, plan, x)[0]
    assert all(
        torch.equal(a, b) for a, b in zip(_state(one).values(), _state(two).values(), strict=True)
    )


def test_a_layer_that_no_data_reaches_keeps_its_factors() -> None:
    tiny = TINY["sides"]
    model = tiny.make()
    plan = prepare(model, Settings(rank=2, convert_anyway=True, convert_head=True)).plan
    layers = tuple(
        layer.model_copy(
            update={"action": "replaced", "reason": "",
                    "factors": {"weight": FactorSpec(out=(4, 5), inp=(3, 4))}}
        )
        if layer.name == "side" else layer for layer in plan.layers
    )  # fmt: skip
    plan = plan.model_copy(update={"layers": layers})
    done = apply_plan(model, plan).model
    before = _state(done.get_submodule("side"))
    errors, missed = fit_to_data(model, done, plan, [tiny.inputs(8)])
    assert "side" in missed
    assert "never reached" in missed["side"]
    assert "side" not in errors
    assert all(torch.equal(before[k], v) for k, v in _state(done.get_submodule("side")).items())


def test_a_module_that_is_called_twice_is_fitted_to_both() -> None:
    tiny = TINY["shared"]
    model = tiny.make()
    x, unseen = tiny.inputs(256)[0][0], tiny.inputs(256)[0][0]
    plan = prepare(model, Settings(convert_anyway=True)).plan
    weights = apply_plan(model, plan).model
    done, _ = _fitted(model, plan, x)
    assert done.once is done.again
    assert _error(model, done, unseen) < _error(model, weights, unseen)


HOSTILE: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(8, 24),
    "one example": lambda: torch.randn(1, 24),
    "fewer rows than columns": lambda: torch.randn(5, 24),
    "a constant column": lambda: torch.randn(64, 24) * (torch.arange(24) > 0) + 5,
    "all the same": lambda: torch.full((64, 24), 1000.1),
    "huge": lambda: 1e8 * torch.randn(64, 24),
    "tiny": lambda: 1e-8 * torch.randn(64, 24),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_data_gives_a_finite_model(name: str) -> None:
    model, inputs, draw = _mlp()
    x = HOSTILE[name]()
    plan = _planned(model, inputs, 0.4, examples(x))
    done = apply_plan(model, plan).model
    fit_to_data(model, done, plan, examples(x).batches)
    assert all(bool(torch.isfinite(p).all()) for p in done.parameters())
    with torch.no_grad():
        assert bool(torch.isfinite(done.eval()(draw(8))).all())
        expected = model.eval()(x)
        assert float((done(x) - expected).norm()) < 0.7 * float(expected.norm())


@pytest.mark.parametrize("fails", ["source", "converted"])
def test_nothing_is_left_behind_by_an_error(fails: str) -> None:
    model, inputs, draw = _mlp()
    model.train()
    plan = _planned(model, inputs, 0.4)
    done = apply_plan(model, plan).model
    (model if fails == "source" else done)[1] = nn.Linear(7, 7)  # type: ignore[operator]
    with pytest.raises(DataError, match=r"\(8, 24\)"):
        fit_to_data(model, done, plan, examples(draw(8)).batches)
    assert _hooks(model) == _hooks(done) == 0
    assert model.training


def test_half_precision_is_fitted_in_its_own_dtype() -> None:
    model, inputs, draw = _mlp()
    plan = _planned(model, inputs, 0.4)
    x, unseen = draw(192), draw(96)
    model.bfloat16()
    plan = _planned(model, inputs, 0.4)
    weights = apply_plan(model, plan).model
    done, _ = _fitted(model, plan, x)
    assert {p.dtype for p in done.parameters()} == {torch.bfloat16}
    low = unseen.bfloat16()
    assert _error(model, done, low) < _error(model, weights, low)


def test_nothing_to_fit() -> None:
    model, inputs, draw = _mlp()
    plan = prepare(model, Settings(exclude=("*",), inputs=inputs)).plan
    done = apply_plan(model, plan).model
    assert fit_to_data(model, done, plan, examples(draw(8)).batches) == ({}, {})


class _Last(nn.Module):
    """The last state of a bidirectional LSTM over (N, 9, 10) steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 8, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x)[0][:, -1]
        return found


@pytest.mark.parametrize("joint", [False, True], ids=["each gate", "joint"])
def test_gates_are_fitted_by_how_far_each_output_moves_the_state(joint: bool) -> None:
    """The input weights meet the same data in both models: their fit is a weighted SVD."""
    torch.manual_seed(0)
    model = _Last()
    with torch.no_grad():
        model.lstm.bias_ih_l0[:4] += 9  # half of the input gates stand open whatever comes
        model.lstm.bias_ih_l0_reverse[20:24] -= 9  # here half of the cells hardly change
    data = examples(2 * torch.randn(96, 9, 10))
    outputs = 32 if joint else 8
    pair = FactorSpec(out=(outputs, 1), inp=(1, 10), rank=3)
    recurrent = FactorSpec(out=(outputs, 1), inp=(1, 8), rank=3)
    settings = Settings(inputs=(TensorSpec(shape=(9, 10)),), convert_anyway=True, rank=3)
    plan = prepare(model, settings).plan
    layer = plan.layers[0].model_copy(
        update={"factors": {"ih_l0": pair, "hh_l0": recurrent}, "action": "replaced"}
    )
    small = apply_plan(model, recount(model, plan.model_copy(update={"layers": (layer,)}))).model
    fit_to_data(model, small, plan.model_copy(update={"layers": (layer,)}), data.batches)
    sites = walk(model)
    moments = gather(model, sites, data.batches, order_of(model, sites, data.batches))
    for side, moment in zip(("", "_reverse"), moments["lstm", "ih_l0"], strict=True):
        metric, weights = moment.metric(), moment.weights
        assert weights is not None
        assert float(weights.max() / weights.min()) > 5
        dense = getattr(model.lstm, f"weight_ih_l0{side}").detach()
        fitted = getattr(small.lstm, f"weight_ih_l0{side}").detach()
        parts = [one.split(outputs) for one in (weights, dense, fitted)]
        for rows, whole, near in zip(*parts, strict=True):
            values = torch.linalg.svdvals(metric.root(rows[:, None] * whole).double())
            best = float(values[3:].square().sum())
            assert metric.energy(rows[:, None] * (whole - near)) == pytest.approx(best, rel=1e-2)


def test_a_forward_that_writes_on_its_own_weights_changes_only_copies() -> None:
    class Worn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(24, 36, 40, 8)
            self.scale = nn.Parameter(torch.ones(24))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.mul_(0.9)
            out: Tensor = self.body(x * self.scale)
            return out

    model, inputs = Worn(), (TensorSpec(shape=(24,)),)
    plan = _planned(model, inputs, 0.4)
    small = apply_plan(model, plan).model
    fit_to_data(model, small, plan, examples(vectors(40, 24)).batches)
    for one in (model, small):
        assert torch.equal(one.scale, torch.ones(24))  # type: ignore[arg-type]
