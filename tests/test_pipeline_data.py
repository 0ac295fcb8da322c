"""``calibrate``, ``evaluate`` and ``target`` of plan, apply and convert."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bp_convert
from bp_convert import pipeline
from bp_convert.data import Examples, Uses, examples_for, split_for
from bp_convert.errors import BpConvertError, DataError, PlanError
from bp_convert.values.settings import Settings
from bp_convert.values.target import Target
from bp_convert.verify import fingerprint_of_data


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(48, 72), nn.ReLU(), nn.Linear(72, 60), nn.ReLU(), nn.Linear(60, 10)
    )


def vectors(count: int = 80) -> Tensor:
    return torch.randn(count, 10) @ torch.randn(10, 48)


def error(small: nn.Module, net: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        wanted = net(x)
        return float((small(x) - wanted).norm() / wanted.norm())


def rows(examples: Examples) -> list[tuple[float, ...]]:
    return [tuple(row.tolist()) for args, _ in examples.batches for row in args[0]]


def refuses(kind: type[BpConvertError], *words: str) -> pytest.RaisesExc[BpConvertError]:
    """Expect an error whose four parts are filled and whose text holds all the words."""

    def has_all(problem: BpConvertError) -> bool:
        parts = (problem.where, problem.found, problem.allowed, problem.fix)
        return all(parts) and all(word in str(problem) for word in words)

    return pytest.RaisesExc(kind, check=has_all)


def held_as(x: Tensor, form: str, folder: Path) -> Any:
    """Return one set of examples in one of the forms that the functions take."""
    labels = torch.zeros(len(x), dtype=torch.long)
    forms: dict[str, Callable[[], Any]] = {
        "tensor": lambda: x,
        "mapping": lambda: {"input": x},
        "tuple": lambda: (x,),
        "loader": lambda: DataLoader(TensorDataset(x, labels), batch_size=16),
        "data set": lambda: TensorDataset(x, labels),
        "batches": lambda: [(part, labels[: len(part)]) for part in torch.tensor_split(x, 5)],
        "function": lambda: lambda: iter(torch.tensor_split(x, 5)),
    }
    if form in forms:
        return forms[form]()
    np.save(folder / "x.npy", x.numpy())
    return folder / "x.npy" if form == "path" else str(folder / "x.npy")


@pytest.mark.parametrize(
    "form",
    ["tensor", "mapping", "tuple", "loader", "data set", "batches", "function", "path", "text"],
)
def test_data_in_every_form_is_the_same_data(form: str, tmp_path: Path) -> None:
    net, x = model(), vectors()
    before = fingerprint_of_data(net)
    small, report = bp_convert.convert(
        net, target="params=0.3", calibrate=held_as(x, form, tmp_path)
    )
    assert fingerprint_of_data(net) == before
    total = sum(p.numel() for p in net.parameters())
    assert 0.9 * 0.3 < sum(p.numel() for p in small.parameters()) / total <= 0.3
    assert report.calibration
    assert [str(one) for one in report.plan.settings.target] == ["params=0.3"]
    assert error(small, net, x) < 0.4


def test_data_makes_a_better_model_of_the_same_size() -> None:
    net, x = model(), vectors()
    fitted, _ = bp_convert.convert(net, target="params=0.3", calibrate=x)
    blind, _ = bp_convert.convert(net, target="params=0.3")
    assert error(fitted, net, x) < 0.5 * error(blind, net, x)


def test_a_target_is_text_a_value_or_several() -> None:
    net = model()
    plans = [
        bp_convert.plan(net, target=one)
        for one in ("params=0.4", Target.parse("params=40%"), ["params=0.4"])
    ]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].error is not None
    both = bp_convert.plan(net, target=["params=0.4", "macs=0.3"])
    assert both.macs is not None
    assert both.macs.ratio <= 0.3
    assert both.params.ratio <= 0.4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": "params=0.001"}, ["out of reach", "a share of"]),
        ({"target": ["params=0.2", "params=0.3"]}, ["two targets"]),
        ({"target": "params=0.3", "alpha": 2}, ["leave --alpha or --target out"]),
        ({"target": "params=0.3", "init": "random"}, ["must be warm"]),
        ({"target": "params=0.3", "method": "kron-data"}, ["calibration data"]),
        ({"target": "params"}, ["QUANTITY=VALUE"]),
        ({"target": "params=0.3", "method": "best"}, ["method"]),
    ],
)
def test_what_cannot_be_planned_is_told(given: dict[str, Any], words: list[str]) -> None:
    with refuses(PlanError, *words):
        bp_convert.plan(model(), **given)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.zeros(4, 50), ["50", "48"]),
        (torch.full((4, 48), float("nan")), ["NaN"]),
        (torch.zeros(0, 48), ["no examples"]),
        (torch.zeros(4, 48, dtype=torch.long), ["int64"]),
        ("absent.npz", ["absent.npz"]),
        ({"pixels": torch.zeros(4, 50)}, ["50", "48"]),
        (lambda: iter(()), ["no examples"]),
    ],
)
def test_data_that_does_not_fit_is_told(data: Any, words: list[str]) -> None:
    for call in (bp_convert.plan, bp_convert.convert):
        with refuses(DataError, *words):
            call(model(), target="params=0.4", calibrate=data)
    with refuses(DataError, *words):
        bp_convert.convert(model(), target="params=0.4", evaluate=data)


def test_plan_then_apply_is_convert() -> None:
    net, x = model(), vectors()
    plan = bp_convert.plan(net, target="params=0.4", calibrate=x)
    assert plan.calibration
    again = bp_convert.plan(net, target="params=0.4", calibrate=x)
    assert plan.model_dump_json(by_alias=True) == again.model_dump_json(by_alias=True)
    one = bp_convert.apply(net, plan, calibrate=x)
    two, _ = bp_convert.convert(net, target="params=0.4", calibrate=x)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    blind = bp_convert.apply(net, plan)
    assert [p.shape for p in blind.parameters()] == [p.shape for p in one.parameters()]
    assert error(one, net, x) < error(blind, net, x)


@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
def test_an_edited_plan_is_applied_as_edited(by_data: bool) -> None:
    net, x = model(), vectors()
    data = x if by_data else None
    plan = bp_convert.plan(net, target="params=0.4", calibrate=data)
    raw = json.loads(plan.model_dump_json(by_alias=True))
    layer = next(one for one in raw["layers"] if one["factors"])
    layer["factors"]["weight"]["rank"] = 2
    edited = type(plan).model_validate(raw)
    small, report = bp_convert.convert(net, plan=edited, calibrate=data)
    assert small.get_submodule(layer["name"]).factors.rank == 2  # type: ignore[union-attr]
    assert report.plan.params.after == sum(p.numel() for p in small.parameters())
    assert report.plan.params.after < plan.params.after


def test_a_plan_made_on_data_and_applied_without_is_noted() -> None:
    net, x = model(), vectors()
    plan = bp_convert.plan(net, target="params=0.4", calibrate=x)
    _, report = bp_convert.convert(net, plan=plan)
    assert any("though planned on data" in note for note in report.notes)
    assert report.calibration == ""
    _, report = bp_convert.convert(net, plan=plan, calibrate=x)
    assert not any("though planned on data" in note for note in report.notes)
    assert report.calibration


def test_methods_by_the_weights_do_not_follow_data() -> None:
    net, x = model(), vectors()
    one, report = bp_convert.convert(net, target="params=0.4", method="kron", calibrate=x)
    two, _ = bp_convert.convert(net, target="params=0.4", method="kron")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert report.calibration == ""


def test_widening_does_not_follow_data() -> None:
    with refuses(PlanError, "widened layer", "alpha 1"):
        bp_convert.convert(model(), alpha=2, calibrate=vectors(), convert_anyway=True)


# Evaluation


def test_scores_are_those_of_the_returned_model() -> None:
    net, x, other = model(), vectors(), vectors(30)
    small, report = bp_convert.convert(
        net, target="params=0.3", calibrate=x, evaluate=other, metric="error"
    )
    (score,) = report.scores
    assert score.before == 0
    assert score.examples == 30
    assert score.after == pytest.approx(error(small, net, other), rel=1e-4)
    assert f"{score.after:.3g}"[:4] in report.verdict


def test_labels_make_it_accuracy() -> None:
    net, x = model(), vectors(60)
    labelled = DataLoader(TensorDataset(x, net(x).argmax(1)), batch_size=20)
    small, report = bp_convert.convert(net, target="params=0.3", evaluate=labelled)
    (score,) = report.scores
    right = (small(x).argmax(1) == net(x).argmax(1)).float().mean()
    assert (score.metric, score.before) == ("accuracy", 1.0)
    assert score.after == pytest.approx(float(right))


@pytest.mark.parametrize("form", ["tensor", "loader", "text", "other text", "options", "path"])
def test_one_source_never_gives_an_example_to_both(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = model(), vectors(600)
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", x.numpy())
    one: Any = x
    two: Any = x
    if form == "loader":
        one = two = DataLoader(TensorDataset(x), batch_size=32)
    elif form != "tensor":
        one = "x.npy"
        names = {"text": "x.npy", "other text": "./x.npy", "options": tmp_path / "x.npy"}
        two = names.get(form, Path("x.npy"))
    split = split_for(net, Uses(one, evaluate=two))
    assert split.calibrate is not None
    assert split.evaluate is not None
    taken, scored = split.calibrate.examples, split.evaluate.examples
    assert taken.count == 512
    assert rows(taken) == rows(examples_for(net, one))
    assert scored.count == 88
    assert not set(rows(taken)) & set(rows(scored))
    _, report = bp_convert.convert(net, target="params=0.4", calibrate=one, evaluate=two)
    assert report.scores[0].examples == 88


def test_a_source_of_which_nothing_is_left_is_refused() -> None:
    net, x = model(), vectors(40)
    with refuses(DataError, "calibration has used the first 40"):
        bp_convert.convert(net, target="params=0.4", calibrate=x, evaluate=x)
    other = x.clone()
    _, report = bp_convert.convert(net, target="params=0.4", calibrate=x, evaluate=other)
    assert report.scores[0].examples == 40


def test_examples_pass_as_they_are_and_the_seed_chooses() -> None:
    net, x = model(), vectors(40)
    made = examples_for(net, x, count=8)
    assert examples_for(net, made, count=3) is made
    split = split_for(net, Uses(made, evaluate=made))
    assert split.evaluate is not None
    assert split.evaluate.examples is made
    other = examples_for(net, x, Settings(seed=1), count=8)
    assert rows(made) != rows(other)
    assert rows(made) == rows(examples_for(net, x, count=8))


def test_ids_are_held_to_the_table_that_reads_them() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(30, 24)
            self.head = nn.Linear(24, 6)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(tokens).mean(1))
            return out

    settings = Settings(inputs=pipeline.plan(Words(), inputs=["tokens=int64:1x5<9999"]).inputs)
    fine = examples_for(Words(), {"tokens": torch.randint(0, 30, (6, 7))}, settings)
    assert fine.count == 6
    with refuses(DataError, "ids from", "0 to 29"):
        examples_for(Words(), {"tokens": torch.tensor([[1, 2, 30]])}, settings)


@pytest.mark.parametrize(
    ("count", "words", "examples"),
    [(700, "data that nothing was fitted to", 32), (520, "data that nothing was fitted to", 8),
     (80, "calibration data", 32)],
)  # fmt: skip
def test_what_is_not_calibrated_on_is_what_outputs_are_compared_on(
    count: int, words: str, examples: int
) -> None:
    net, x = model(), vectors(count)
    small, report = bp_convert.convert(net, calibrate=x, target="params=0.4", convert_anyway=True)
    found = report.verification
    assert found is not None
    assert (found.on, found.examples) == (words, examples)
    taken = examples_for(net, x)
    assert taken.fresh is not None
    batch = taken.fresh()
    assert (batch is None) == (count <= 512)
    if batch is not None:
        fresh = batch[0][0]
        assert len(fresh) == examples
        assert not {tuple(row.tolist()) for row in fresh} & set(rows(taken))
        with torch.no_grad():
            gap = (small(fresh) - net(fresh)).norm() / (net(fresh) - net(fresh).mean(0)).norm()
        assert found.output_error == pytest.approx(float(gap), rel=0.05)
