"""What holds of every kind: the twin is the dense layer of its weights, counted and carried."""

from __future__ import annotations

import copy
import inspect
import io
from math import prod

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bp_convert.kinds import KINDS, Ask, Spread, kind_of
from bp_convert.widths.followers import interleave
from tests.contract.cases import CASES, VARIANTS, Case, arguments, call_shape, kind, main, output
from tests.tolerances import assert_near

EVERY = pytest.mark.parametrize("case", [*CASES, *VARIANTS], ids=str)
ASKS = pytest.mark.parametrize(
    "ask", [Ask(), Ask("paper"), Ask(rank=3), Ask("paper", 2), Ask(rank=0.4)], ids=repr
)


def _twin(case: Case, ask: Ask, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    dense = case.make().to(dtype)
    one = kind(case)
    widths = one.widths(dense)
    twin = one.build(dense, widths, one.factor(dense, widths, ask), "cpu")
    one.fill(dense, twin, Spread())
    one.carry(dense, twin)
    return dense, twin


def test_there_is_a_case_for_every_kind() -> None:
    # What poses as a parameter is indexed, not called on an input: tests/kinds/test_stack.py asks
    # the same of it.
    assert [case.kind for case in CASES] == [one.name for one in KINDS if not one.bare]


@EVERY
@ASKS
def test_the_twin_is_the_dense_layer_of_its_own_weights(case: Case, ask: Ask) -> None:
    _, twin = _twin(case, ask)
    x = case.draw(torch.float64)
    back = twin.to_dense()  # type: ignore[operator]
    assert_near(output(twin, x), output(back, x))
    assert type(back) is kind(case).dense


@EVERY
@ASKS
def test_the_error_is_that_of_the_weights(case: Case, ask: Ask) -> None:
    dense, twin = _twin(case, ask)
    one = kind(case)
    error = one.fill(dense, twin, Spread())
    back = twin.to_dense()  # type: ignore[operator]
    pairs = [
        (p, dict(back.named_parameters())[n]) for n, p in dense.named_parameters() if "weight" in n
    ]
    gap = sum(float((a - b).detach().square().sum()) for a, b in pairs)
    size = sum(float(a.detach().square().sum()) for a, _ in pairs)
    assert error == pytest.approx((gap / size) ** 0.5, rel=1e-6, abs=1e-9)
    assert 0 < error < 1


@EVERY
def test_full_rank_reproduces_the_layer(case: Case) -> None:
    dense, twin = _twin(case, Ask(rank=10**6))
    x = case.draw(torch.float64)
    assert_near(output(twin, x), output(dense, x))


@EVERY
@ASKS
def test_predicted_parameters_are_the_counted_ones(case: Case, ask: Ask) -> None:
    dense, twin = _twin(case, ask)
    one = kind(case)
    widths = one.widths(dense)
    factors = one.factor(dense, widths, ask)
    assert one.params(dense, widths) == sum(p.numel() for p in dense.parameters())
    assert one.params(dense, widths, factors) == sum(p.numel() for p in twin.parameters())


@EVERY
@ASKS
def test_predicted_multiply_adds_are_the_counted_ones(case: Case, ask: Ask) -> None:
    dense = case.make()
    one = kind(case)
    widths = one.widths(dense)
    factors = one.factor(dense, widths, ask)
    twin = one.build(dense, widths, factors, "meta").eval()
    x = case.draw(torch.float32)
    with FlopCounterMode(display=False) as counter:
        twin(*arguments(twin, x.to("meta")))
    assert counter.get_total_flops() == 2 * one.macs(dense, widths, factors, [call_shape(case, x)])


@EVERY
def test_a_widened_twin_preserves_the_function(case: Case) -> None:
    """Old inputs and outputs repeated, at full rank: the same numbers, repeated."""
    one = kind(case)
    dense = case.make().double()
    inputs, outputs = one.widths(dense)
    words = one.lookup
    times = 2 if one.follows else 3
    wide = (inputs if words else 2 * inputs, times * outputs)
    spread = Spread(
        None if words else interleave(inputs, 2 * inputs), interleave(outputs, times * outputs)
    )
    factors = one.factor(dense, wide, Ask(rank=10**6))
    twin = one.build(dense, wide, factors, "cpu")
    assert one.fill(dense, twin, spread) < 1e-9
    x = case.draw(torch.float64)
    axis = 1 if hasattr(dense, "kernel_size") else -1
    wider = x if words else x.repeat_interleave(2, axis)
    assert_near(output(twin, wider), output(dense, x).repeat_interleave(times, axis))


@EVERY
def test_fields_are_carried_and_nothing_is_shared(case: Case) -> None:
    dense = case.make().eval()
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_("bias" in name)
    one = kind(case)
    widths = one.widths(dense)
    twin = one.build(dense, widths, one.factor(dense, widths, Ask(rank=2)), "cpu")
    one.fill(dense, twin, Spread())
    one.carry(dense, twin)
    assert not twin.training
    for name, parameter in twin.named_parameters():
        assert parameter.requires_grad == ("bias" in name), name
    storages = {p.untyped_storage().data_ptr() for p in dense.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in twin.parameters()}


@EVERY
def test_every_constructor_field_is_accounted_for(case: Case) -> None:
    dense = case.make()
    stack = isinstance(dense, nn.RNNBase)
    signature = inspect.signature((nn.RNNBase if stack else type(dense)).__init__)
    fields = {n for n in signature.parameters if n not in ("self", "device", "dtype")}
    fields -= {"args", "kwargs", "_weight", "_freeze"}
    if stack:
        fields -= {"mode"}  # which the class is
        fields -= set() if isinstance(dense, nn.LSTM) else {"proj_size"}
        fields |= {"nonlinearity"} if isinstance(dense, nn.RNN) else set()
    assert set(kind(case).fields) == fields


@EVERY
def test_what_is_not_supported_is_refused_with_a_word(case: Case) -> None:
    one = kind(case)
    assert one.refuse(case.make()) is None
    if case.unsupported is not None:
        reason = one.refuse(case.unsupported())
        assert reason is not None
        assert case.word in reason


@EVERY
def test_subclasses_count_only_where_they_compute_the_same(case: Case) -> None:
    dense: type[nn.Module] = kind(case).dense
    same = type("Same", (dense,), {"note": 1})
    other = type("Other", (dense,), {"forward": lambda self, x: x})
    module = case.make()
    tried = kind(case) if kind(case).probed else None  # which shows whether it computes the same
    for kind_type, matches, expected in ((same, True, kind(case)), (other, False, tried)):
        module.__class__ = kind_type
        assert kind(case).matches(module) is matches
        assert kind_of(module) is expected
    assert kind_of(_twin(case, Ask())[1]) is None


@EVERY
@pytest.mark.filterwarnings("ignore:.*weights are not part of single")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_state_copies_export_and_compile(case: Case) -> None:
    _, twin = _twin(case, Ask(rank=2), torch.float32)
    twin.eval()
    args = arguments(twin, case.draw(torch.float32))
    expected = main(twin(*args))
    assert torch.equal(main(copy.deepcopy(twin)(*args)), expected)
    buffer = io.BytesIO()
    torch.save(twin.state_dict(), buffer)
    buffer.seek(0)
    _, other = _twin(case, Ask(rank=2), torch.float32)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(main(other.eval()(*args)), expected)
    exported = torch.export.export(twin, args).module()
    assert_near(main(exported(*args)), expected)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_near(main(compiled(*args)), expected)


@EVERY
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    _, twin = _twin(case, Ask(rank=2))
    output(twin, case.draw(torch.float64)).square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


@EVERY
def test_explicit_pairs_that_do_not_fit_are_an_error(case: Case) -> None:
    from bp_convert.errors import PlanError
    from bp_convert.values.settings import Pairs

    dense = case.make()
    one = kind(case)
    with pytest.raises(PlanError, match=r"pairs"):
        one.factor(dense, one.widths(dense), Ask(Pairs(out=(7, 7), inp=(1, 1))))


@EVERY
def test_explicit_pairs_are_taken(case: Case) -> None:
    from bp_convert.values.settings import Pairs

    dense = case.make()
    one = kind(case)
    inputs, outputs = one.widths(dense)
    size, groups = prod(getattr(dense, "kernel_size", (1,))), getattr(dense, "groups", 1)
    size *= getattr(dense, "in2_features", 1)
    pairs = Pairs(out=(1, outputs // groups), inp=(1, inputs // groups * size))
    factors = one.factor(dense, (inputs, outputs), Ask(pairs))
    assert factors.get("hr_l0", next(iter(factors.values()))).out == pairs.out
