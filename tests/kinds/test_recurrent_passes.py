"""How much each output of an LSTM's weights counts, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from bp_convert.kinds import kind_of
from bp_convert.kinds.recurrent_passes import recurrent_weights
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
