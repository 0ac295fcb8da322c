"""What the search for pairs and the fit to data need of every kind."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

from bp_convert.kinds import Choices, Spread
from bp_convert.kron.als import fit_in_metric, natural
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Plain
from bp_convert.seen.pick import Pick
from bp_convert.values.factors import FactorSpec
from tests.contract.cases import CASES, VARIANTS, Case, call_shape, given, kind, output
from tests.tolerances import assert_near

EVERY = pytest.mark.parametrize("case", [*CASES, *VARIANTS], ids=str)
ALL = Pick(10**9)


def _dense(case: Case) -> nn.Module:
    return case.make().double()


def _choices(case: Case, dense: nn.Module) -> dict[str, Choices]:
    one = kind(case)
    return one.choices(dense, one.widths(dense))


def _covering(matrix: Tensor, spec: FactorSpec) -> Tensor:
    """Fill a matrix up with columns of zeros where the pair covers more than it has."""
    wide = matrix.new_zeros(matrix.shape[0], prod(spec.inp))
    wide[:, : matrix.shape[1]] = matrix
    return wide


def _placed(case: Case, dense: nn.Module, factors: dict[str, FactorSpec]) -> nn.Module:
    """Build a twin matrix by matrix, as the fit to data does."""
    one = kind(case)
    widths = one.widths(dense)
    twin = one.build(dense, widths, factors, "cpu")
    choices = one.choices(dense, widths)
    for role, matrices in one.matrices(dense, Spread()).items():
        spec = factors[role]
        columns = Columns.of(spec, choices[role].kernel)
        for index, matrix in enumerate(matrices):
            near = fit_in_metric(_covering(matrix, spec), spec, columns, Plain())
            one.place(twin, role, index, near.w1, near.w2)
    one.rest(dense, twin, Spread())
    one.carry(dense, twin)
    return twin


@EVERY
def test_matrices_and_choices_speak_of_the_same_roles(case: Case) -> None:
    dense, one = _dense(case), kind(case)
    widths = one.widths(dense)
    matrices, choices = one.matrices(dense, Spread()), _choices(case, dense)
    assert list(matrices) == list(choices)
    held = sum(p.numel() for n, p in dense.named_parameters() if "weight" in n)
    assert sum(m.numel() for ones in matrices.values() for m in ones) == held
    for role, ones in matrices.items():
        assert len({m.shape for m in ones}) == 1
        rows, columns = ones[0].shape
        specs = list(choices[role].specs())
        assert len(set(specs)) == len(specs)
        for spec in specs:
            assert prod(spec.out) == rows
            assert prod(spec.inp) >= columns
            assert Columns.of(spec, choices[role].kernel).inp == spec.inp
        low = [s for s in specs if s.out == (rows, 1) and s.inp == (1, columns)]
        assert low, "low-rank must be among the choices"
        assert choices[role].outs == tuple(sorted(choices[role].outs))
        for pairs in choices[role].ins.values():
            assert pairs == tuple(sorted(pairs))
    least = {role: next(choice.specs()) for role, choice in choices.items()}
    twin = one.build(dense, widths, least, "meta")
    assert one.params(dense, widths, least) == sum(p.numel() for p in twin.parameters())


@EVERY
def test_every_choice_placed_at_full_rank_reproduces_the_layer(case: Case) -> None:
    dense = _dense(case)
    x = case.draw(torch.float64)
    expected = output(dense, x)
    choices = _choices(case, dense)
    first = {role: next(choice.specs()) for role, choice in choices.items()}
    full = {r: s.model_copy(update={"rank": s.full_rank}) for r, s in first.items()}
    for role, choice in choices.items():
        for spec in choice.specs():
            whole = spec.model_copy(update={"rank": spec.full_rank})
            assert_near(output(_placed(case, dense, {**full, role: whole}), x), expected)


@pytest.mark.slow
@EVERY
def test_a_placed_twin_is_the_dense_layer_of_its_natural_weights(case: Case) -> None:
    """Few terms, each matrix with its own: a matrix placed for another would show."""
    dense, one = _dense(case), kind(case)
    choices = _choices(case, dense)
    for number in range(max(len(list(c.specs())) for c in choices.values())):
        factors = {}
        for role, choice in choices.items():
            specs = list(choice.specs())
            spec = specs[number % len(specs)]
            factors[role] = spec.model_copy(update={"rank": min(2, spec.full_rank)})
        twin = _placed(case, dense, factors)
        back = twin.to_dense()  # type: ignore[operator]
        found = one.matrices(back, Spread())
        for role, matrices in one.matrices(dense, Spread()).items():
            spec = factors[role]
            columns = Columns.of(spec, choices[role].kernel)
            for mine, matrix in zip(found[role], matrices, strict=True):
                near = fit_in_metric(_covering(matrix, spec), spec, columns, Plain())
                want = natural(near.w1, near.w2, columns)[:, : matrix.shape[1]]
                padded = getattr(dense, "padding_idx", None)
                if padded is not None:
                    mine, want = mine.clone(), want.clone()
                    mine[:, padded] = want[:, padded] = 0
                assert_near(mine, want)


@EVERY
def test_adding_adds_to_the_matrices(case: Case) -> None:
    dense, one = _dense(case), kind(case)
    before = {r: [m.clone() for m in ones] for r, ones in one.matrices(dense, Spread()).items()}
    for role, ones in before.items():
        changes = [torch.randn_like(m) for m in ones]
        one.add(dense, role, changes)
        after = one.matrices(dense, Spread())
        for other, others in before.items():
            for index, m in enumerate(others):
                change = changes[index] if other == role else 0
                assert_near(after[other][index].detach(), (m + change).detach())
        one.add(dense, role, [-change for change in changes])


@EVERY
def test_rows_fit_the_matrices_and_are_the_same_for_the_same_seed(case: Case) -> None:
    dense, one = _dense(case), kind(case)
    x = case.draw(torch.float64)
    seen, matrices = given(case, x), one.matrices(dense, Spread())
    with torch.no_grad():
        rows = one.rows(dense, seen, ALL)
        assert list(rows) == list(matrices)
        for role, sides in rows.items():
            assert len(matrices[role]) % len(sides) == 0
            for side in sides:
                assert side.shape[1:] == (() if one.lookup else (matrices[role][0].shape[1],))
        for pick in (Pick(4, 1), Pick(4, 2)):
            some, again = one.rows(dense, seen, pick), one.rows(dense, seen, pick)
            for role, sides in some.items():
                for side, same, whole in zip(sides, again[role], rows[role], strict=True):
                    assert torch.equal(side, same)
                    assert len(side) <= len(whole)
                    held = whole.reshape(len(whole), -1).tolist()
                    assert all(row in held for row in side.reshape(len(side), -1).tolist())


@EVERY
def test_shifting_moves_the_output_of_one_matrix(case: Case) -> None:
    dense, one = _dense(case), kind(case)
    x = case.draw(torch.float64)
    first = {role: next(c.specs()) for role, c in _choices(case, dense).items()}
    twin = _placed(case, dense, first)
    back = {n: p.clone() for n, p in twin.to_dense().named_parameters()}  # type: ignore[operator]
    before = output(twin, x)
    for role, ones in one.matrices(dense, Spread()).items():
        for index, m in enumerate(ones):
            change = torch.randn(m.shape[0], dtype=torch.float64)
            done = one.shift(twin, role, index, change)
            assert done == (not one.lookup and not role.startswith("hr"))  # a projection has none
            if not done:
                assert_near(output(twin, x), before)
                continue
            now = dict(twin.to_dense().named_parameters())  # type: ignore[operator]
            moved = sum(float((now[n] - p).detach().abs().sum()) for n, p in back.items())
            assert moved == pytest.approx(float(change.abs().sum()), rel=1e-9)
            if "Conv" in case.kind or case.kind == "Linear":
                every = torch.zeros(len(ones), len(change), dtype=change.dtype)  # by group
                every[index] = change
                assert_near(output(twin, x), before + every.view(1, -1, *[1] * (x.dim() - 2)))
            one.shift(twin, role, index, -change)
    assert_near(output(twin, x), before)


@EVERY
def test_without_a_bias_nothing_is_shifted(case: Case) -> None:
    dense, one = _dense(case), kind(case)
    if not one.lookup and "bias" not in one.fields:
        pytest.skip("it always has one")
    if isinstance(dense, nn.RNNBase | nn.RNNCellBase):
        dense = type(dense)(12, 16, bias=False).double()
    elif case.kind == "MultiheadAttention":
        dense = nn.MultiheadAttention(24, 4, bias=False).double()
    elif case.kind == "Linear":
        dense = nn.Linear(24, 36, bias=False).double()
    elif not one.lookup:
        dense.register_parameter("bias", None)
    first = {role: next(c.specs()) for role, c in _choices(case, dense).items()}
    twin = _placed(case, dense, first)
    before = {n: p.clone() for n, p in twin.named_parameters()}
    for role, ones in one.matrices(dense, Spread()).items():
        for index, m in enumerate(ones):
            assert not one.shift(twin, role, index, torch.ones(m.shape[0]))
    assert all(torch.equal(before[n], p) for n, p in twin.named_parameters())


@EVERY
def test_a_batch_has_as_many_examples_as_asked(case: Case) -> None:
    """The twin runs on that shape, and counts as many times the work."""
    dense, one = _dense(case), kind(case)
    x = case.draw(torch.float64)
    stack = isinstance(dense, nn.RNNBase)
    axis = 1 if stack and not dense.batch_first else 0
    single = call_shape(case, x.narrow(axis, 0, 1))
    widths = one.widths(dense)
    factors = {role: next(c.specs()) for role, c in _choices(case, dense).items()}
    many = one.batched(dense, single, 7)
    assert many == tuple(7 if i == axis else n for i, n in enumerate(single))
    work = one.macs(dense, widths, factors, [single])
    found = one.macs(dense, widths, factors, [many])
    # A stack takes another path where a batch is larger, if that is less work.
    assert work < found <= 7 * work if stack else found == 7 * work


def test_a_batch_of_calls_without_one() -> None:
    from bp_convert.kinds import kind_of

    for module, shape, expected in (
        (nn.Conv2d(3, 4, 3), (3, 6, 6), (3, 3, 6, 6)),
        (nn.LSTM(5, 4, batch_first=True), (7, 5), (3, 7, 5)),
        (nn.LSTM(5, 4), (7, 5), (7, 3, 5)),
        (nn.LSTM(5, 4), (7, 1, 5), (7, 3, 5)),
        (nn.Embedding(9, 4), (), ()),
    ):
        found = kind_of(module)
        assert found is not None
        assert found.batched(module, shape, 3) == expected
