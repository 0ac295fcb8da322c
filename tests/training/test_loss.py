"""The terms of the loss against naive ones, and what they are learnt from."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import DataError, TrainingError
from bp_convert.feeding.feed import Micro
from bp_convert.training.loss import Objective, divergence, objective_for
from bp_convert.training.watched import Counterparts, layers_in
from bp_convert.values.training import Distill
from tests.training import runs


def micro(x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Micro:
    return Micro((x,), kwargs, labels, len(x), 1.0)


def test_divergence_is_that_of_the_definition() -> None:
    out, reference = torch.randn(5, 7), torch.randn(5, 7)
    p, q = (torch.softmax(one.double() / 3, 1) for one in (reference, out))
    wanted = 9 * (p * (p / q).log()).sum(1).mean()
    assert float(divergence(out, reference, 3.0)) == pytest.approx(float(wanted), rel=1e-5)
    assert float(divergence(out, out, 3.0)) == pytest.approx(0, abs=1e-6)
    assert float(divergence(out, reference, 1.0)) != pytest.approx(float(wanted), rel=0.01)


def test_divergence_stays_finite_in_half_precision_and_at_extremes() -> None:
    out = torch.tensor([[300.0, -300.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = divergence(out, -out.detach(), 1.0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert math.isfinite(loss.item())
    assert bool(out.grad.isfinite().all())


def test_masked_places_do_not_count() -> None:
    out, reference = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    wanted = divergence(out[mask], reference[mask], 2.0)
    assert float(divergence(out, reference, 2.0, mask)) == pytest.approx(float(wanted))
    assert float(divergence(out, reference, 2.0)) != pytest.approx(float(wanted), rel=1e-3)


def test_terms_add_up_by_their_weights() -> None:
    x, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    reference = torch.randn(6, 4)
    weights = Distill(labels=0.5, logits=2.0, temperature=3.0, layers=4.0)
    found = Objective("classes", weights, True, True)(x, micro(x, labels), reference,
                                                      torch.tensor(0.25))  # fmt: skip
    wanted = 0.5 * F.cross_entropy(x, labels) + 2 * divergence(x, reference, 3.0) + 1.0
    assert float(found) == pytest.approx(float(wanted))


def test_outputs_that_are_no_scores_are_matched_by_square_and_direction() -> None:
    out, reference = torch.randn(6, 3, 8), torch.randn(6, 3, 8)
    found = Objective("features", Distill(), False, True)(out, micro(out), reference)
    square = (out - reference).square().mean() / reference.square().mean()
    cosine = F.cosine_similarity(out.flatten(1), reference.flatten(1)).mean()
    assert float(found) == pytest.approx(float(square + 1 - cosine))


@pytest.mark.parametrize(
    ("raw", "labels", "task"),
    [
        (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), "classes"),
        (torch.randn(4, 3), None, "classes"),
        (F.normalize(torch.randn(4, 3)), None, "features"),
        (torch.rand(4, 3), None, "features"),
        (torch.randn(4, 1), torch.randn(4), "values"),
        (torch.randn(4, 3, 5), torch.ones(4, 3, dtype=torch.int64), "tokens"),
        (torch.randn(4, 3, 5), None, "features"),
    ],
)
def test_the_task_is_told_from_outputs_and_labels(
    raw: Tensor, labels: Tensor | None, task: str
) -> None:
    model = nn.Linear(2, 2)
    assert objective_for(model, raw, micro(torch.randn(4, 2), labels), raw, Distill()).task == task


def test_a_language_model_learns_the_next_token() -> None:
    class TinyLMHead(nn.Module):
        pass

    ids, scores = torch.tensor([[1, 2, 3], [3, 0, 0]]), torch.randn(2, 3, 5)
    batch = Micro((), {"input_ids": ids, "attention_mask": (ids > 0).long()}, None, 2, 1.0)
    raw = SimpleNamespace(logits=scores)
    made = objective_for(TinyLMHead(), raw, batch, None, Distill())
    assert made.causal
    wanted = F.cross_entropy(scores[0, :2], torch.tensor([2, 3]))
    assert float(made(raw, batch, None)) == pytest.approx(float(wanted))


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 2, 9]), torch.randn(4, 2)])
def test_labels_that_do_not_fit_are_named(labels: Tensor) -> None:
    with pytest.raises(DataError, match="labels"):
        objective_for(nn.Linear(2, 2), torch.randn(4, 3), micro(torch.randn(4, 2), labels), None,
                      Distill())  # fmt: skip


def test_without_labels_the_teacher_is_enough() -> None:
    small, source = runs.converted()
    points, _ = runs.data()
    trained, report = bp_convert.finetune(small, points, teacher=source, epochs=20, lr=0.02)
    assert report.after["cosine"] > report.before["cosine"]
    gaps = [(m(points) - source(points)).square().mean().item() for m in (small, trained)]
    assert gaps[1] < 0.5 * gaps[0]
    assert any("KL to the teacher" in note for note in report.notes)
    with pytest.raises(DataError, match="no labels and no teacher"):
        bp_convert.finetune(small, points)


@pytest.mark.slow
def test_layers_learn_the_outputs_of_those_they_stand_for() -> None:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(),
                           nn.Linear(32, 4))  # fmt: skip
    small, _ = bp_convert.convert(source, rank=2, convert_anyway=True, inputs=["16"])
    points, _ = runs.data()

    def far(model: nn.Module) -> float:
        pairs = Counterparts(model, source, layers_in(model, source))
        assert pairs.names == ("0", "2")
        with torch.no_grad(), pairs:
            model(points), source(points)
        model(points)  # such as a validation, which does not count
        found = pairs.gap()
        pairs.remove()
        assert found is not None
        return float(found)

    only = {"labels": 0.0, "logits": 0.0, "layers": 1.0}
    trained, _ = bp_convert.finetune(
        small, points, teacher=source, distill=only, epochs=20, lr=0.02, validation=0.0
    )
    assert far(trained) < 0.85 * far(small)
    with pytest.raises(TrainingError, match="no bilinear layer"):
        bp_convert.finetune(runs.plain(), points, teacher=source, distill=only)


def test_another_teacher_s_outputs_do_not_fit() -> None:
    small, _ = runs.converted()
    with pytest.raises(DataError, match="outputs of shape"):
        bp_convert.finetune(small, runs.data(), teacher=nn.Linear(16, 5))


@pytest.mark.slow
def test_regression_learns_floating_point_labels() -> None:
    points, _ = runs.data()
    wanted = points[:, :1] * 2
    model = nn.Sequential(nn.Linear(16, 1))
    _, report = bp_convert.finetune(model, (points, wanted), epochs=30, lr=0.05)
    assert report.after["loss"] < 0.1 * report.before["loss"]
    assert set(report.after) == {"loss"}


@pytest.mark.slow
def test_the_teacher_stays_as_it_is() -> None:
    small, source = runs.converted()
    source.train()
    before = {k: v.clone() for k, v in source.state_dict().items()}
    _, report = bp_convert.finetune(small, runs.data(), teacher=source)
    assert source.training
    assert all(torch.equal(before[k], v) for k, v in source.state_dict().items())
    assert set(report.teacher) == {"accuracy"}
