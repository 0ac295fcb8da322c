"""What each kind says its weights multiply, against what the modules compute."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from bp_convert.kinds import kind_of
from bp_convert.seen.pick import Pick
from tests.tolerances import assert_near

ALL = Pick(10**9)


def _rows(module: nn.Module, x: Any, pick: Pick = ALL) -> dict[str, list[Tensor]]:
    kind = kind_of(module)
    assert kind is not None
    return kind.rows(module, x, pick)


def _one(module: nn.Module, x: Tensor, pick: Pick = ALL) -> Tensor:
    (only,) = _rows(module, x, pick)["weight"]
    return only


# Convolutions: rows times the flat weight are the output, place by place

CONVS: list[tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = [
    (nn.Conv1d, {"kernel_size": 3, "stride": 2, "padding": 1}, (9,)),
    (nn.Conv1d, {"kernel_size": 4, "padding": "same", "dilation": 2}, (9,)),
    (nn.Conv1d, {"kernel_size": 3, "padding": "valid", "dilation": 3}, (9,)),
    (nn.Conv1d, {"kernel_size": 1}, (5,)),
    (nn.Conv2d, {"kernel_size": (3, 2), "stride": (1, 3), "dilation": (2, 1)}, (8, 7)),
    (nn.Conv2d, {"kernel_size": (2, 4), "padding": "same", "dilation": (3, 1)}, (6, 5)),
    (nn.Conv2d, {"kernel_size": (1, 1), "padding": 2, "stride": 2}, (4, 5)),
    (nn.Conv3d, {"kernel_size": (2, 1, 3), "stride": (1, 2, 1), "padding": (1, 0, 2)}, (3, 5, 4)),
    *(
        (nn.Conv2d, {"kernel_size": 3, "padding": (2, 1), "padding_mode": mode}, (6, 5))
        for mode in ("zeros", "reflect", "replicate", "circular")
    ),
    (nn.Conv2d, {"kernel_size": 4, "padding": "same", "padding_mode": "reflect"}, (6, 7)),
    (nn.Conv2d, {"kernel_size": 4, "padding": "same", "padding_mode": "circular"}, (6, 7)),
    (nn.Conv3d, {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"}, (3, 4, 3)),
    (nn.Conv1d, {"kernel_size": 3, "padding": 2, "padding_mode": "circular", "stride": 3}, (7,)),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("make", "asked", "size"), CONVS)
def test_patches_times_the_weight_are_the_output(
    make: Any, asked: dict[str, Any], size: tuple[int, ...]
) -> None:
    module = make(3, 4, bias=False, dtype=torch.float64, **asked)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    rows = _one(module, x)
    y = module(x)
    assert_near(rows @ module.weight.flatten(1).t(), y.flatten(2).transpose(1, 2).flatten(0, 1))
    assert_near(_one(module, x[0]), rows[: len(rows) // 2])


@pytest.mark.parametrize("fault", ["stride", "dilation", "padding_mode", "padding"])
def test_a_field_that_is_not_heeded_shows(fault: str) -> None:
    """The negative twin: rows of a module that differs in one field do not fit."""
    asked: dict[str, Any] = {"stride": 1, "dilation": 1, "padding": 2, "padding_mode": "zeros"}
    other = {"stride": 2, "dilation": 2, "padding": 1, "padding_mode": "circular"}
    right = nn.Conv2d(3, 4, 3, bias=False, dtype=torch.float64, **asked)
    wrong = nn.Conv2d(3, 4, 3, bias=False, dtype=torch.float64, **{**asked, fault: other[fault]})
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    flat = right(x).flatten(2).transpose(1, 2).flatten(0, 1)
    weight = right.weight.flatten(1)
    assert_near(_one(right, x) @ weight.t(), flat)
    with pytest.raises(AssertionError):
        assert_near(_one(wrong, x) @ weight.t(), flat)


def _is_within(some: Tensor, whole: Tensor) -> bool:
    held = [tuple(row.tolist()) for row in whole]
    return all(tuple(row.tolist()) in held for row in some)


PICKED: list[tuple[nn.Module, Tensor]] = [
    (nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 6, 6)),
    (nn.Conv1d(3, 4, 3), torch.randn(5, 3, 9)),
    (nn.Linear(5, 4), torch.randn(6, 7, 5)),
]


@pytest.mark.parametrize(("module", "x"), PICKED, ids=lambda v: type(v).__name__)
def test_a_pick_is_a_part_of_all_rows_and_the_same_for_the_same_seed(
    module: nn.Module, x: Tensor
) -> None:
    whole = _one(module, x)
    found = {seed: _one(module, x, Pick(20, seed)) for seed in range(4)}
    for seed, some in found.items():
        assert len(x) <= len(some) <= max(20, len(x))
        assert _is_within(some, whole)
        assert len(torch.unique(some, dim=0)) == len(some)
        assert torch.equal(some, _one(module, x, Pick(20, seed)))
    assert not all(torch.equal(found[0], some) for some in found.values())
    assert torch.equal(_one(module, x, Pick(len(whole))), whole)


def test_a_pick_takes_every_image_and_leaves_the_random_state_alone() -> None:
    module, x = PICKED[0]
    state = torch.get_rng_state()
    some = _one(module, x, Pick(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(some) == len(x)  # one patch of each, at least


def test_every_place_is_picked_sooner_or_later() -> None:
    module, x = nn.Conv1d(1, 2, 1), torch.arange(30.0).view(1, 1, 30)
    met = torch.cat([_one(module, x, Pick(5, seed)) for seed in range(60)])
    assert set(met.flatten().tolist()) == set(range(30))


# Linear layers and embeddings


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5), (2, 1, 3, 5)])
def test_rows_of_a_linear_layer(shape: tuple[int, ...]) -> None:
    module = nn.Linear(5, 4, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    rows = _one(module, x)
    assert_near(rows @ module.weight.t() + module.bias, module(x).reshape(-1, 4))
    turned = torch.randn(*reversed(shape), dtype=torch.float64).permute(
        *reversed(range(len(shape)))
    )
    assert torch.equal(_one(module, turned), turned.reshape(-1, 5))


def test_padding_tokens_are_left_out() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    x = torch.randn(2, 3, 5)
    expected = torch.stack([x[0, 0], x[0, 1], x[1, 0]])
    for form in (mask, mask.bool()):
        assert torch.equal(_one(nn.Linear(5, 4), x, Pick(100, 0, form)), expected)
    tokens = torch.tensor([[4, 7, 0], [9, 0, 0]])
    assert _one(nn.Embedding(10, 6), tokens, Pick(100, 0, mask)).tolist() == [4, 7, 9]
    # A layer behind a pooling has no tokens: the mask does not speak of its rows.
    assert torch.equal(_one(nn.Linear(5, 4), x[:, 0], Pick(100, 0, mask)), x[:, 0])
    assert len(_one(nn.Linear(5, 4), x, Pick(2, 0, mask))) == 2


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_indices_that_are_looked_up(shape: tuple[int, ...]) -> None:
    module = nn.Embedding(10, 6, dtype=torch.float64)
    tokens = torch.randint(0, 10, shape)
    rows = _one(module, tokens)
    one_hot = torch.eye(10, dtype=torch.float64)[rows]
    kind = kind_of(module)
    assert kind is not None
    from bp_convert.kinds import Spread

    (table,) = kind.matrices(module, Spread())["weight"]
    assert_near(one_hot @ table.t(), module(tokens).reshape(-1, 6))


# LSTMs: every gate's pre-activation, step by step


def _cells(module: nn.LSTM, x: Tensor, lengths: list[int]) -> dict[str, list[Tensor]]:
    """Walk (T, N, I) with nn.LSTMCell, one sequence at a time; return by weight what it met."""
    found: dict[str, list[list[Tensor]]] = {}
    sides = ("", "_reverse") if module.bidirectional else ("",)
    for layer in range(module.num_layers):
        nexts = []
        for number, side in enumerate(sides):
            cell = nn.LSTMCell(x.shape[2], module.hidden_size, module.bias, dtype=x.dtype)
            for part in ("ih", "hh"):
                for name in ("weight", "bias") if module.bias else ("weight",):
                    own = getattr(module, f"{name}_{part}_l{layer}{side}")
                    getattr(cell, f"{name}_{part}").data.copy_(own)
            met_x = [[torch.empty(0)] * len(lengths) for _ in range(len(x))]
            met_h = [[torch.empty(0)] * len(lengths) for _ in range(len(x))]
            y = x.new_zeros(len(x), len(lengths), module.hidden_size)
            for n, length in enumerate(lengths):
                h, c = x.new_zeros(module.hidden_size), x.new_zeros(module.hidden_size)
                for t in range(length - 1, -1, -1) if side else range(length):
                    met_x[t][n], met_h[t][n] = x[t, n], h
                    h, c = cell(x[t, n], (h, c))
                    y[t, n] = h
            for role, met in ((f"ih_l{layer}", met_x), (f"hh_l{layer}", met_h)):
                rows = [
                    met[t][n] for t, n in product(range(len(x)), range(len(lengths)))
                    if t < lengths[n]
                ]  # fmt: skip
                found.setdefault(role, []).append(rows)
                assert len(found[role]) == number + 1
            nexts.append(y)
        x = torch.cat(nexts, -1)
    return {role: [torch.stack(rows) for rows in both] for role, both in found.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
@torch.no_grad()
def test_rows_of_an_lstm_are_those_that_its_cells_meet(
    layers: int, bidirectional: bool, bias: bool
) -> None:
    module = nn.LSTM(5, 3, layers, bias, bidirectional=bidirectional, dtype=torch.float64)
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    expected = _cells(module, x, [6] * 4)
    found = _rows(module, x)
    assert found.keys() == expected.keys()
    for role, sides in expected.items():
        assert len(found[role]) == len(sides)
        for one, two in zip(found[role], sides, strict=True):
            assert_near(one, two)
    module.batch_first = True
    for role, sides in _rows(module, x.transpose(0, 1)).items():
        for one, two in zip(sides, expected[role], strict=True):
            assert_near(one, two)


@pytest.mark.parametrize("bidirectional", [True, False])
@torch.no_grad()
def test_rows_of_one_sequence_without_a_batch(bidirectional: bool) -> None:
    x = torch.randn(6, 5, dtype=torch.float64)
    for batch_first in (True, False):
        module = nn.LSTM(
            5, 3, 2, batch_first=batch_first, bidirectional=bidirectional, dtype=torch.float64
        )
        expected = _cells(module, x[:, None], [6])
        for role, sides in _rows(module, x).items():
            for one, two in zip(sides, expected[role], strict=True):
                assert_near(one, two)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("sorted_", [True, False])
@torch.no_grad()
def test_rows_of_packed_sequences_end_with_each_sequence(
    sorted_: bool, bidirectional: bool
) -> None:
    module = nn.LSTM(5, 3, 2, bidirectional=bidirectional, dtype=torch.float64)
    lengths = [6, 4, 1] if sorted_ else [4, 6, 1]
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=sorted_)
    expected = _cells(module, x, lengths)
    found = _rows(module, packed)
    for role, sides in expected.items():
        for one, two in zip(found[role], sides, strict=True):
            assert one.shape == (sum(lengths), two.shape[1])
            assert_near(_sorted(one), _sorted(two))


def _sorted(rows: Tensor) -> Tensor:
    return torch.stack(sorted(rows, key=lambda row: row.tolist()))


@torch.no_grad()
def test_a_pick_of_an_lstm_takes_the_same_steps_of_both_weights() -> None:
    module = nn.LSTM(5, 3, bidirectional=True)
    x = torch.randn(6, 4, 5)
    packed = pack_sequence([torch.randn(length, 5) for length in (6, 4, 1)])
    one_by_one: list[Tensor | PackedSequence] = [x, packed]
    for given in one_by_one:
        whole = _rows(module, given)
        some = _rows(module, given, Pick(7, 3))
        again = _rows(module, given, Pick(7, 3))
        for role, sides in some.items():
            for side, rows in enumerate(sides):
                assert len(rows) == 7
                assert torch.equal(rows, again[role][side])
                places = [
                    next(i for i, row in enumerate(whole[role][side]) if torch.equal(row, mine))
                    for mine in rows
                ]
                assert places == sorted(places)


@torch.no_grad()
def test_looking_at_rows_leaves_a_module_as_it_was() -> None:
    modules = [nn.LSTM(5, 3, 2), nn.Conv2d(3, 4, 3), nn.Linear(5, 4)]
    inputs = [torch.randn(6, 4, 5), torch.randn(2, 3, 6, 6), torch.randn(7, 5)]
    for module, x in zip(modules, inputs, strict=True):
        before = {name: p.clone() for name, p in module.named_parameters()}
        copy, state = x.clone(), torch.get_rng_state()
        for sides in _rows(module, x).values():
            for rows in sides:
                assert not rows.requires_grad
        assert torch.equal(x, copy)
        assert torch.equal(torch.get_rng_state(), state)
        assert module.training
        for name, p in module.named_parameters():
            assert torch.equal(p, before[name])
            assert p.requires_grad


def test_the_places_of_a_kernel_are_counted() -> None:
    module = nn.Conv3d(2, 3, (2, 3, 1), stride=2)
    rows = _one(module, torch.randn(2, 2, 5, 6, 4))
    assert rows.shape == (2 * prod((2, 2, 2)), 2 * 6)
