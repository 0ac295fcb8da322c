"""What recurrent weights see, and how much each of their outputs counts, against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from bp_convert.kinds import kind_of
from bp_convert.seen.pick import Pick
from bp_convert.seen.recurrent_passes import Started, recurrent_rows, recurrent_weights
from tests.tolerances import assert_near


def _cell(z: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = z.chunk(4, -1)
    new = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * new.tanh(), new


def _oracle(lstm: nn.LSTM, suffix: str, x: Tensor) -> Tensor:
    """Return the mean square of dh/dz over one sequence (T, D), by autograd, step by step."""
    ih, hh = (getattr(lstm, f"weight_{role}_{suffix}").detach() for role in ("ih", "hh"))
    bias = sum(getattr(lstm, f"bias_{role}_{suffix}").detach() for role in ("ih", "hh"))
    h = c = torch.zeros(lstm.hidden_size, dtype=x.dtype)
    total = torch.zeros(4 * lstm.hidden_size, dtype=x.dtype)
    for step in x.flip(0) if suffix.endswith("reverse") else x:
        z = (ih @ step + hh @ h + bias).requires_grad_()
        new, c2 = _cell(z, c)
        for unit in range(lstm.hidden_size):  # a unit's state hangs on its own four gates alone
            (grad,) = torch.autograd.grad(new[unit], z, retain_graph=True)
            assert int((grad != 0).sum()) <= 4
            total += grad.square()
        h, c = new.detach(), c2.detach()
    return total / len(x)


@pytest.mark.parametrize("both", [False, True])
def test_they_are_the_squared_derivatives_of_the_state(both: bool) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 3, 2, bidirectional=both).double()
    x = 3 * torch.randn(7, 1, 5, dtype=torch.float64)
    found = recurrent_weights(lstm, x)
    assert set(found) == {"ih_l0", "hh_l0", "ih_l1", "hh_l1"}
    first = nn.LSTM(5, 3, bidirectional=both).double()
    first.load_state_dict({n: p for n, p in lstm.state_dict().items() if "l0" in n})
    inner = first(x)[0][:, 0].detach()
    for layer, inputs in ((0, x[:, 0]), (1, inner)):
        for side, suffix in enumerate(("", "_reverse") if both else ("",)):
            for role in ("ih", "hh"):
                expected = _oracle(lstm, f"l{layer}{suffix}", inputs)
                assert_near(found[f"{role}_l{layer}"][side], expected)


def test_padding_counts_for_nothing() -> None:
    lstm = nn.LSTM(5, 3, bidirectional=True)
    long, short = torch.randn(6, 5), torch.randn(4, 5)
    padded = torch.stack([long, torch.cat([short, torch.full((2, 5), 9.0)])], 1)
    packed = recurrent_weights(lstm, pack_padded_sequence(padded, [6, 4]))
    alone = [recurrent_weights(lstm, one[:, None]) for one in (long, short)]
    for role, sides in packed.items():
        for side, found in enumerate(sides):
            both = alone[0][role][side] * 6 + alone[1][role][side] * 4
            assert_near(found.float(), both.float() / 10)


def test_a_gate_that_is_shut_costs_nothing() -> None:
    lstm = nn.LSTM(4, 2)
    with torch.no_grad():
        lstm.bias_ih_l0[:2] = -40  # no input gets in, so that nothing but the output gate counts
        lstm.bias_hh_l0[:2] = 0
    (found,) = recurrent_weights(lstm, torch.randn(5, 3, 4))["ih_l0"]
    assert float(found.max()) < 1e-12


def test_other_kinds_count_all_outputs_alike() -> None:
    for module, x in (
        (nn.Linear(3, 4), torch.ones(2, 3)),
        (nn.Conv1d(3, 4, 2), torch.ones(1, 3, 5)),
    ):
        kind = kind_of(module)
        assert kind is not None
        assert kind.weights(module, x) == {}


# Other modes, cells, and states that are given

ALL = Pick(10**9)
DRAWS: dict[str, Any] = {"dtype": torch.float64}


def _next(module: Any, zx: Tensor, zh: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Step on the outputs of both weights, by the formulas of torch's documentation."""
    name = type(module).__name__
    if name.startswith("LSTM"):
        return _cell(zx + zh, c)
    if name.startswith("GRU"):
        (xr, xz, xn), (hr, hz, hn) = zx.chunk(3), zh.chunk(3)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        return (1 - z) * n + z * h, c
    z = zx + zh
    return (z.tanh() if module.nonlinearity == "tanh" else z.relu()), c


MODULES = {
    "GRU": lambda: nn.GRU(5, 3, **DRAWS),
    "RNN": lambda: nn.RNN(5, 3, **DRAWS),
    "RNN relu": lambda: nn.RNN(5, 3, nonlinearity="relu", bias=False, **DRAWS),
    "LSTM": lambda: nn.LSTM(5, 3, **DRAWS),
    "GRUCell": lambda: nn.GRUCell(5, 3, **DRAWS),
    "LSTMCell": lambda: nn.LSTMCell(5, 3, bias=False, **DRAWS),
    "RNNCell": lambda: nn.RNNCell(5, 3, **DRAWS),
}


@pytest.mark.parametrize("name", MODULES)
def test_rows_and_weights_of_every_mode_start_from_the_state_that_is_given(name: str) -> None:
    module: Any = MODULES[name]()
    cell = name.endswith("Cell")
    x = 2 * torch.randn(1 if cell else 6, 5, **DRAWS)
    h, c = torch.randn(2, 3, **DRAWS)
    side = "" if cell else "_l0"
    state = (h, c) if "LSTM" in name else (h,)
    given = [one if cell else one[None, None] for one in state]
    hx = tuple(given) if "LSTM" in name else given[0]
    call = Started(x[0] if cell else x[:, None], hx)
    total = [torch.zeros(module.get_parameter(f"weight_ih{side}").shape[0], **DRAWS)] * 2
    befores = []
    for step in x:
        befores.append(h)
        z = []
        for part, rows in (("ih", step), ("hh", h)):
            bias = module.get_parameter(f"bias_{part}{side}").detach() if module.bias else 0
            z.append(module.get_parameter(f"weight_{part}{side}").detach() @ rows + bias)
        zx, zh = (one.requires_grad_() for one in z)
        new, c2 = _next(module, zx, zh, h, c)
        for unit in range(3):
            grads = torch.autograd.grad(new[unit], (zx, zh), retain_graph=True)
            total = [one + grad.square() for one, grad in zip(total, grads, strict=True)]
        h, c = new.detach(), c2.detach()
    found, rows = recurrent_weights(module, call), recurrent_rows(module, call, ALL)
    ih, hh = (f"{part}{side}" for part in ("ih", "hh"))
    assert list(found) == list(rows) == [ih, hh]
    for role, expected in zip((ih, hh), total, strict=True):
        assert_near(found[role][0], expected / len(x))
    assert_near(rows[ih][0], x)
    assert_near(rows[hh][0], torch.stack(befores))


def test_a_projection_reads_what_it_makes_the_state_of() -> None:
    lstm = nn.LSTM(5, 6, 2, proj_size=2, bidirectional=True, **DRAWS)
    x, hx = torch.randn(4, 3, 5, **DRAWS), (torch.randn(4, 3, 2, **DRAWS),
                                            torch.randn(4, 3, 6, **DRAWS))  # fmt: skip
    rows = recurrent_rows(lstm, Started(x, hx), ALL)
    assert list(rows) == [f"{part}_l{layer}" for layer in (0, 1) for part in ("ih", "hh", "hr")]
    made = [
        rows["hr_l1"][side] @ getattr(lstm, f"weight_hr_l1{end}").t()
        for side, end in enumerate(("", "_reverse"))
    ]
    assert_near(torch.cat(made, -1).view(4, 3, 4), lstm(x, hx)[0])


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_a_state_is_that_of_its_own_sequence_where_they_are_packed(make: Any) -> None:
    module = make(5, 3, 2, bidirectional=True, **DRAWS)
    x, lengths = torch.randn(6, 3, 5, **DRAWS), [4, 6, 1]
    states = torch.randn(2, 4, 3, 3, **DRAWS)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)

    def at(index: Any) -> Any:
        found = states[:, :, index]
        return tuple(found) if make is nn.LSTM else found[0]

    together = recurrent_rows(module, Started(packed, at(slice(None))), ALL)
    for role, sides in together.items():
        for side, found in enumerate(sides):
            alone = [
                recurrent_rows(module, Started(x[:length, n : n + 1], at(slice(n, n + 1))), ALL)
                for n, length in enumerate(lengths)
            ]
            expected = torch.cat([one[role][side] for one in alone])
            assert_near(
                *(torch.stack(sorted(r, key=lambda v: v.tolist())) for r in (found, expected))
            )
