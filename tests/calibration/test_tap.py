from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration.gatherer import gather, order_of
from bp_convert.calibration.tap import Tap, run_quietly, token_mask
from bp_convert.errors import DataError
from bp_convert.graph.walk import walk
from bp_convert.layers import BPGRUCell
from tests.tiny_models import Chain, Keyword, Shared, Sides


def _hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def _batch(*args: Tensor, **kwargs: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def test_inputs_are_caught_and_the_model_is_left_as_it_was() -> None:
    model = Chain().train()
    model.norm.eval()
    flags = [m.training for m in model.modules()]
    x = torch.randn(4, 6)
    with Tap(model, ["first", "second"]) as tap:
        assert not model.training
        seen = tap.run(_batch(x))
        assert _hooks(model) == 2
    assert torch.equal(seen["first"][0], x)
    inner = model.norm(torch.relu(model.first(x)))
    assert torch.equal(seen["second"][0], inner)
    assert seen.keys() == {"first", "second"}
    assert [m.training for m in model.modules()] == flags
    assert _hooks(model) == 0
    assert not seen["second"][0].requires_grad


def test_a_run_ends_once_all_has_been_seen() -> None:
    model = Chain()
    ran: list[str] = []
    model.head.register_forward_hook(lambda *_: ran.append("head"))
    with Tap(model, ["first", "second"], {"first": 1, "second": 1}) as tap:
        assert tap.run(_batch(torch.randn(4, 6))).keys() == {"first", "second"}
        assert ran == []
        assert len(tap.run(_batch(torch.randn(4, 6)))["first"]) == 1
    with Tap(model, ["first"]) as tap:
        tap.run(_batch(torch.randn(4, 6)))
    assert ran == ["head"]


def test_each_call_of_a_shared_module_is_caught() -> None:
    model = Shared()
    for calls in (None, {"once": 2}):
        with Tap(model, ["once"], calls) as tap:
            seen = tap.run(_batch(torch.randn(4, 6)))
        assert len(seen["once"]) == 2
        assert not torch.equal(*seen["once"])
    with Tap(model, ["again"]) as tap:  # by its other name
        assert len(tap.run(_batch(torch.randn(4, 6)))["again"]) == 2


def test_layers_that_are_not_reached_are_missing() -> None:
    model = Sides()
    with Tap(model, ["stem", "side", "spare"]) as tap:
        assert tap.run(_batch(torch.randn(4, 6))).keys() == {"stem"}


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(input=x)


def test_an_input_given_by_keyword_is_caught() -> None:
    x = torch.randn(4, 6)
    with Tap(ByName(), ["inner"]) as tap:
        assert torch.equal(tap.run(_batch(x))["inner"][0], x)
    words = torch.randint(0, 30, (2, 9))
    with Tap(Keyword(), ["words"]) as tap:
        assert torch.equal(tap.run(_batch(tokens=words))["words"][0], words)


def test_data_that_the_model_does_not_take_is_an_error_and_nothing_is_left_behind() -> None:
    model = Chain().train()
    with Tap(model, ["first"]) as tap, pytest.raises(DataError, match=r"(4, 7)"):
        tap.run(_batch(torch.randn(4, 7)))
    assert _hooks(model) == 0
    assert model.training
    with pytest.raises(ZeroDivisionError), Tap(model, ["first"]):
        raise ZeroDivisionError
    assert _hooks(model) == 0
    assert model.training
    with pytest.raises(DataError, match="calibration data"):
        run_quietly(model, _batch(torch.randint(0, 3, (4, 6))))


def test_running_keeps_the_examples_and_makes_no_graph() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mul_(2))

    x = torch.randn(4, 6)
    before = x.clone()
    assert not run_quietly(InPlace(), _batch(x)).requires_grad
    assert torch.equal(x, before)


def test_the_mask_of_the_tokens() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert token_mask(_batch(attention_mask=mask)) is mask
    assert token_mask(_batch(torch.ones(2, 5))) is None
    assert token_mask(_batch(attention_mask=torch.ones(2, 1, 5, 5))) is None


@pytest.mark.parametrize("by_name", [False, True])
def test_the_state_that_a_cell_is_given_is_caught_of_its_twin_too(by_name: bool) -> None:
    class Steps(nn.Module):
        def __init__(self, cell: nn.Module) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            h = self.cell(x)
            return self.cell(x, hx=h) if by_name else self.cell(x, h)

    dense, x = nn.GRUCell(6, 4), torch.randn(3, 6)
    for cell in (dense, BPGRUCell.from_dense(dense, rank=99)):
        with Tap(Steps(cell), ["cell"]) as tap:
            first, second = tap.run(((x,), {}))["cell"]
        assert torch.equal(first, x)
        assert torch.equal(second.x, x)
        torch.testing.assert_close(second.hx, dense(x))


class _Residual(nn.Module):
    """Adds what two layers make of x to x itself, in place or not."""

    def __init__(self, *, inplace: bool, inference: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.inplace, self.inference = inplace, inference

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(self.inference):
            x = x + 1
            for layer, other in zip(self.layers[::2], self.layers[1::2], strict=True):
                made = 5 * layer(x).tanh() * other(x)
                x = x.add_(made) if self.inplace else x + made
            return x


@pytest.mark.parametrize("inference", [False, True])
def test_layers_get_what_they_got_before_the_model_wrote_on_it(inference: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    batches: list[Any] = [((torch.randn(32, 8, generator=draw),), {}) for _ in range(2)]
    found, orders = [], []
    for inplace in (False, True):
        model = _Residual(inplace=inplace, inference=inference).eval()
        sites = walk(model)
        orders.append(order_of(model, sites, batches))
        found.append(gather(model, sites, batches, orders[-1]))
    assert (
        orders[0].together
        == orders[1].together
        == [
            ["layers.0", "layers.1"],
            ["layers.2", "layers.3"],
        ]
    )
    for key, (moment,) in found[0].items():
        torch.testing.assert_close(moment.mean, found[1][key][0].mean)
