"""Moments of whole models against inputs caught one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration.gatherer import gather, order_of
from bp_convert.calibration.moments import FAINT, SCARCE, Moment, ridge
from bp_convert.errors import DataError
from bp_convert.graph.walk import walk
from bp_convert.kron.metric import RIDGE, Diagonal, Full
from bp_convert.seen.recurrent_passes import recurrent_weights
from tests.tiny_models import TINY, Attention, Chain, Residual, Shared, Sides
from tests.tolerances import assert_near

F32 = torch.float32


def _batches(*sizes: int, shape: tuple[int, ...]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((torch.randn(size, *shape),), {}) for size in sizes]


def _moments(model: nn.Module, batches: Any) -> dict[tuple[str, str], list[Moment]]:
    sites = [site for site in walk(model) if site.kind.refuse(site.module) is None]
    return gather(model, sites, batches, order_of(model, sites, batches))


def _covariance(rows: Tensor, *, centred: bool) -> Tensor:
    rows = rows.double()
    mean = rows.mean(0) if centred else 0 * rows.mean(0)
    moment = (rows - mean).t() @ (rows - mean) / len(rows)
    share = ridge(len(moment), len(rows))
    return moment + share * moment.diagonal().mean() * torch.eye(len(moment)).double()


def _caught(model: nn.Module, name: str, batches: Any) -> list[Tensor]:
    found: list[Tensor] = []
    module = model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model.eval()
    for args, kwargs in batches:
        model(*args, **kwargs)
    handle.remove()
    return found


def test_few_rows_are_trusted_less_and_fewer_than_columns_far_less() -> None:
    assert ridge(64, 640) == pytest.approx(RIDGE + 0.1 * SCARCE)
    assert ridge(64, 64) == pytest.approx(RIDGE + SCARCE)
    assert ridge(64, 16) == pytest.approx(RIDGE + 16 * SCARCE)


def test_every_layer_s_moment_is_that_of_its_inputs() -> None:
    model = Chain()
    batches = _batches(8, 8, 3, shape=(6,))
    found = _moments(model, batches)
    assert found.keys() == {(name, "weight") for name in ("first", "second", "head")}
    for name in ("first", "second", "head"):
        rows = torch.cat(_caught(model, name, batches))
        (moment,) = found[name, "weight"]
        assert moment.count == 19
        metric = moment.metric()
        assert isinstance(metric, Full)
        assert_near(metric.matrix, _covariance(rows, centred=True), F32)


def test_a_convolution_s_rows_are_its_patches() -> None:
    model = Residual()
    batches = _batches(4, 4, shape=(3, 4, 4))
    (moment,) = _moments(model, batches)["inner", "weight"]
    images = torch.cat(_caught(model, "inner", batches))
    rows = nn.functional.unfold(images, 3, padding=1).transpose(1, 2).flatten(0, 1)
    metric = moment.metric()
    assert isinstance(metric, Full)
    assert moment.count == len(rows)
    assert_near(metric.matrix, _covariance(rows, centred=True), F32)


def test_means_are_taken_off_where_something_takes_them_up() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = nn.Conv1d(3, 4, 1, bias=False)
            self.norm = nn.BatchNorm1d(4)
            self.bare = nn.Conv1d(4, 4, 1, bias=False)
            self.biased = nn.Conv1d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.biased(self.bare(self.norm(self.normed(x)).relu()).relu())

    model = Net()
    batches = [((torch.randn(8, 3, 5) + 2,), {})]
    sites = walk(model)
    order = order_of(model, sites, batches)
    assert order.normed == {"normed"}
    found = gather(model, sites, batches, order)
    for name, centred in (("normed", True), ("bare", False), ("biased", True)):
        rows = torch.cat(_caught(model, name, batches)).transpose(1, 2).flatten(0, 1)
        metric = found[name, "weight"][0].metric()
        assert isinstance(metric, Full)
        assert_near(metric.matrix, _covariance(rows, centred=centred), F32)


def test_a_module_that_is_called_twice_sees_both() -> None:
    model = Shared()
    batches = _batches(8, 5, shape=(6,))
    sites = walk(model)
    assert order_of(model, sites, batches).calls == {"stem": 1, "once": 2, "head": 1}
    (moment,) = _moments(model, batches)["once", "weight"]
    rows = torch.cat(_caught(model, "once", batches))
    assert moment.count == len(rows) == 26
    metric = moment.metric()
    assert isinstance(metric, Full)
    assert_near(metric.matrix, _covariance(rows, centred=True), F32)


def test_layers_that_are_never_reached_have_none() -> None:
    model = Sides()
    found = _moments(model, _batches(4, shape=(6,)))
    assert {name for name, _ in found} == {"stem", "head"}


def test_layers_that_read_one_tensor_are_found() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
            self.value = nn.Linear(6, 6, bias=False)
            self.out = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.query(x) * self.key(x) + self.value(x))

    model = Heads()
    batches = _batches(8, shape=(7, 6))
    sites = walk(model)
    order = order_of(model, sites, batches)
    assert order.together == [["query", "key", "value"], ["out"]]
    found = gather(model, sites, batches, order)
    assert found["query", "weight"] is found["key", "weight"]
    assert found["query", "weight"] is not found["value", "weight"]  # that one has no bias
    rows = batches[0][0][0].flatten(0, 1)
    for name, centred in (("key", True), ("value", False)):
        metric = found[name, "weight"][0].metric()
        assert isinstance(metric, Full)
        assert_near(metric.matrix, _covariance(rows, centred=centred), F32)


def test_padding_tokens_do_not_count() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 6)
            self.inner = nn.Linear(6, 5)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.inner(self.words(input_ids)) * attention_mask[..., None]

    tokens = torch.randint(1, 10, (4, 7))
    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 1])[:, None]).long()
    tokens = tokens * mask
    model = Masked()
    found = _moments(model, [((), {"input_ids": tokens, "attention_mask": mask})])
    counts = found["words", "weight"][0].metric()
    assert isinstance(counts, Diagonal)
    assert float(counts.weights[0]) == float(counts.weights.min())
    kept = tokens[mask.bool()]
    metric = found["inner", "weight"][0].metric()
    assert isinstance(metric, Full)
    assert_near(metric.matrix, _covariance(model.words(kept).detach(), centred=True), F32)


def test_an_lstm_has_a_moment_for_each_weight_and_direction() -> None:
    tiny = TINY["recurrent"]
    model = tiny.make()
    batches = [tiny.inputs(4) for _ in range(2)]
    found = _moments(model, batches)
    roles = {role for name, role in found if name == "lstm"}
    assert roles == {"ih_l0", "hh_l0", "ih_l1", "hh_l1"}
    for role in roles:
        assert len(found["lstm", role]) == 2
        assert {m.count for m in found["lstm", role]} == {2 * 4 * 7}
    assert found["words", "weight"][0].lookup


@pytest.mark.parametrize("name", TINY)
def test_every_topology_is_gathered_twice_alike(name: str) -> None:
    tiny = TINY[name]
    model = tiny.make()
    if name == "stateful":
        pytest.skip("its output depends on the runs before")
    model.train()
    flags = [m.training for m in model.modules()]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    torch.manual_seed(1)
    batches = [tiny.inputs(4) for _ in range(2)]
    torch.set_rng_state(state)
    one, two = _moments(model, batches), _moments(model, batches)
    assert torch.equal(torch.get_rng_state(), state)
    assert one.keys() == two.keys()
    for key, moments in one.items():
        for a, b in zip(moments, two[key], strict=True):
            assert a.count == b.count > 0
            assert all(torch.equal(x, y) for x, y in zip(a.moments, b.moments, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_many_rows_are_thinned_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    from bp_convert.calibration import gatherer as module

    monkeypatch.setattr(module, "rows_wanted", lambda columns: 200)
    batches = _batches(10, 10, 10, 2, shape=(50, 6))
    model = Attention()
    found = _moments(model, batches)
    count = found["stem", "weight"][0].count
    assert 200 <= count <= 200 + len(batches)
    assert found["qkv", "weight"][0].count == count


def test_data_that_does_not_fit_is_an_error_and_leaves_no_hooks() -> None:
    model = Chain().train()
    good, bad = _batches(4, shape=(6,)), _batches(4, shape=(7,))
    for batches in (bad, good + bad):
        with pytest.raises(DataError, match="calibration data"):
            _moments(model, batches)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert model.training


def test_outputs_of_an_lstm_carry_how_far_they_move_the_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(5, 4, bidirectional=True, batch_first=True))
    batches = _batches(3, 3, shape=(6, 5))
    moments = _moments(model, batches)
    both = [recurrent_weights(model[0], args[0]) for args, _ in batches]
    for role in ("ih_l0", "hh_l0"):
        for side, moment in enumerate(moments["0", role]):
            roots = (both[0][role][side] + both[1][role][side]).sqrt()
            assert moment.weights is not None
            expected = (roots / roots.mean()).clamp(min=FAINT)
            assert_near(moment.weights.double(), expected, torch.float32)
    assert _moments(nn.Sequential(nn.Linear(5, 4)), batches)["0", "weight"][0].weights is None
