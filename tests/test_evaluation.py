"""Metrics against numbers computed by hand, and what they refuse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.data import Examples, from_tensors
from bp_convert.evaluation import Scorer, scorer
from bp_convert.values.report import Score
from tests.data.crafted import refuses

CALLS: Counter[str] = Counter()


class Given(nn.Module):
    """Returns a row of a table for each example, which is the row's number."""

    def __init__(self, table: Any, wrap: Any = lambda x: x) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.as_tensor(table, dtype=torch.float32))
        self.wrap = wrap
        self.label = ""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        CALLS[self.label] += 1  # of copies, too
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.wrap(self.table[x[:, 0].long()])


class Words(nn.Module):
    """Gives each token a row of a table as the logits of the next one."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.as_tensor(table, dtype=torch.float32))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.table[input_ids]


def evaluate(
    source: nn.Module, models: Iterable[nn.Module], examples: Examples, metric: str | None = None
) -> list[Score]:
    found = Scorer(source, examples, metric)
    return [found.score(model) for model in models]


def rows(count: int, labels: Sequence[int] | None = None, batch: int = 2) -> Examples:
    given = None if labels is None else torch.tensor(labels)
    return from_tensors(torch.arange(float(count))[:, None], given, batch=batch)


def texts(ids: Sequence[Sequence[int]], mask: Sequence[Sequence[int]] | None = None) -> Examples:
    named = {"input_ids": torch.tensor(ids)}
    if mask is not None:
        named["attention_mask"] = torch.tensor(mask)
    return from_tensors(named, batch=2)


# 5 examples of 4 classes, largest first: 0123, 3012, 1230, 2103, 0321
LOGITS = [[9, 5, 2, 1], [5, 4, 3, 6], [0, 9, 8, 7], [1, 2, 3, 0], [9, 1, 2, 3]]
LABELS = [0, 3, 1, 3, 3]


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [("accuracy", 3, 1), ("top1", 3, 1), ("top2", 4, 1), ("top3", 4, 3)],
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_accuracy_counts_hits(metric: str, before: int, after: int, batch: int) -> None:
    found = Scorer(Given(LOGITS), rows(5, LABELS, batch), metric)
    score = found.score(Given(torch.tensor(LOGITS).roll(1, 0)))  # 0321, 0123, 3012, 1230, 2103
    assert (score.metric, score.examples, score.higher_is_better) == (metric, 5, True)
    assert (score.before, score.after) == (before / 5, after / 5)


def test_top_k_may_be_every_class_and_no_more() -> None:
    assert Scorer(Given(LOGITS), rows(5, LABELS), "top4").before == 1
    with refuses("at least 5 classes"):
        Scorer(Given(LOGITS), rows(5, LABELS), "top5")


def test_the_default_depends_on_the_labels() -> None:
    assert Scorer(Given(LOGITS), rows(5, LABELS)).metric == "accuracy"
    assert Scorer(Given(LOGITS), rows(5)).metric == "cosine"
    floats = from_tensors(torch.arange(5.0)[:, None], torch.rand(5))
    assert Scorer(Given(LOGITS), floats).metric == "cosine"


def test_perplexity_by_hand() -> None:
    table = [[0.0, 1.0, 2.0], [3.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    ids = [[0, 2, 1], [1, 0, 0], [2, 2, 1]]
    found = Scorer(Words(table), texts(ids), "perplexity")
    logs = torch.tensor(table).log_softmax(1)
    pairs = [(0, 2), (2, 1), (1, 0), (0, 0), (2, 2), (2, 1)]
    expected = math.exp(-sum(float(logs[a, b]) for a, b in pairs) / 6)
    assert found.before == pytest.approx(expected, rel=1e-6)
    assert found.higher_is_better is False
    assert found.score(Words(torch.zeros(3, 3))).after == pytest.approx(3.0)


@pytest.mark.parametrize("left", [False, True])
def test_perplexity_leaves_padding_out(left: bool) -> None:
    table = torch.randn(4, 4)
    whole = Scorer(Words(table), texts([[1, 2, 3]]), "perplexity").before
    padded = [[0, 0, 1, 2, 3]] if left else [[1, 2, 3, 0, 0]]
    mask = [[0, 0, 1, 1, 1]] if left else [[1, 1, 1, 0, 0]]
    assert Scorer(Words(table), texts(padded, mask), "perplexity").before == pytest.approx(whole)
    assert Scorer(Words(table), texts(padded), "perplexity").before != pytest.approx(whole)


def test_a_very_bad_perplexity_is_finite_until_it_is_not() -> None:
    table = torch.zeros(2, 2)
    table[0, 0] = 300
    assert Scorer(Words(table), texts([[0, 1]]), "perplexity").before == pytest.approx(
        math.exp(300)
    )
    table[0, 0] = 1000
    score = Scorer(Words(table), texts([[0, 1]]), "perplexity").score(Words(table))
    assert score.after == math.inf
    assert Score.model_validate_json(score.model_dump_json()) == score


def test_perplexity_refuses() -> None:
    with refuses("no token ids"):
        Scorer(Given(LOGITS), rows(5), "perplexity")
    with refuses("ids up to 3", "0 to 1"):
        Scorer(Words(torch.zeros(4, 2)), texts([[0, 3]]), "perplexity")
    with refuses("no token after a first one"):
        Scorer(Words(torch.zeros(4, 4)), texts([[1], [2]]), "perplexity")
    with refuses("no token after a first one"):
        Scorer(Words(torch.zeros(4, 4)), texts([[1, 0]], [[1, 0]]), "perplexity")


def test_cosine_and_error_by_hand() -> None:
    source, model = Given([[3.0, 4.0], [1.0, 0.0]]), Given([[3.0, 4.0], [0.0, 2.0]])
    cosine, error = (evaluate(source, [model], rows(2), name)[0] for name in ("cosine", "error"))
    assert (cosine.before, cosine.after) == (1.0, pytest.approx(0.5))
    assert (error.before, error.after) == (0.0, pytest.approx(math.sqrt((1 + 4) / 26)))
    assert cosine.higher_is_better
    assert not error.higher_is_better
    grown = evaluate(source, [Given([[6.0, 8.0], [2.0, 0.0]])], rows(2), "cosine")[0]
    assert grown.after == pytest.approx(1.0)


def test_masked_tokens_do_not_count() -> None:
    table = torch.randn(4, 3)
    changed = table.clone()
    changed[0] += 1  # the padding
    ids, mask = [[1, 2, 0], [3, 0, 0]], [[1, 1, 0], [1, 0, 0]]
    for metric, same in (("cosine", 1.0), ("error", 0.0)):
        masked = evaluate(Words(table), [Words(changed)], texts(ids, mask), metric)[0]
        assert masked.after == pytest.approx(same)
        plain = evaluate(Words(table), [Words(changed)], texts(ids), metric)[0]
        assert plain.after != pytest.approx(same)
    changed = table.clone()
    changed[2] *= -1
    found = evaluate(Words(table), [Words(changed)], texts(ids, mask), "cosine")[0]
    first = nn.functional.cosine_similarity(table[1] + table[2], table[1] - table[2], dim=0)
    assert found.after == pytest.approx((float(first) + 1) / 2, abs=1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, -x),
        lambda x: {"other": -x, "logits": x},
        lambda x: {"hidden": -x, "last_hidden_state": x},
        lambda x: {"last_hidden_state": -x, "logits": x},
        lambda x: [x.long(), x],
        lambda x: {"out": {"deep": x}},
    ],
)
def test_outputs_of_every_structure(wrap: Any) -> None:
    assert Scorer(Given(LOGITS, wrap), rows(5, LABELS)).before == pytest.approx(3 / 5)


def test_outputs_of_transformers() -> None:
    from transformers.modeling_outputs import SequenceClassifierOutput

    def wrap(x: Tensor) -> Any:
        return SequenceClassifierOutput(loss=x.sum(), logits=x)

    assert Scorer(Given(LOGITS, wrap), rows(5, LABELS)).before == pytest.approx(3 / 5)


def test_the_source_is_scored_once() -> None:
    for metric in ("accuracy", "cosine", "error"):
        source = Given(LOGITS)
        source.label = metric
        evaluate(source, [Given(LOGITS), Given(LOGITS)], rows(5, LABELS), metric)
        assert CALLS[metric] == 3  # batches


def test_outputs_that_do_not_fit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source, model = Given(LOGITS), Given(torch.tensor(LOGITS).roll(1, 0))
    kept = evaluate(source, [model], rows(5), "error")[0]
    monkeypatch.setattr(scorer, "KEPT_BYTES", 2 * 4 * 4)  # one batch
    source.label = "again"
    again = evaluate(source, [model], rows(5), "error")[0]
    assert again == kept
    assert CALLS["again"] == 3 + 2


def test_models_are_let_go_once_scored() -> None:
    alive = 0

    class Counted(Given):
        def __init__(self) -> None:
            nonlocal alive
            super().__init__(LOGITS)
            alive += 1
            assert alive <= 2

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    assert len(evaluate(Given(LOGITS), (Counted() for _ in range(4)), rows(5, LABELS))) == 4


def test_models_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model[1].eval()
    flags = [one.training for one in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    data = rows(5, [0, 1, 2, 0, 1])
    evaluate(model, [model], data, "accuracy")
    assert [one.training for one in model.modules()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert Scorer(model, data).before == Scorer(model, data).before  # no dropout


def test_flags_are_put_back_when_forward_fails() -> None:
    class Failing(Given):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
            raise RuntimeError("no")

    model = Failing(LOGITS).train()
    with pytest.raises(Exception, match="RuntimeError: no"):
        Scorer(model, rows(5, LABELS))
    assert model.training


def test_examples_stay_as_they_are() -> None:
    class Greedy(Given):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
            found = super().forward(x)
            x.zero_()
            return found

    data = rows(5, LABELS)
    assert evaluate(Greedy(LOGITS), [Greedy(LOGITS)], data)[0].after == pytest.approx(3 / 5)
    assert data.batches[1][0][0].tolist() == [[2], [3]]


def test_half_precision_models_are_scored() -> None:
    model = nn.Linear(1, 3).half()
    assert Scorer(model, rows(4)).before == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("table", "labels", "metric", "words"),
    [
        (LOGITS, None, "accuracy", ("no labels", "cosine")),
        (LOGITS, [0, 1, 2, 3, 4], None, ("the label 4", "0 to 3")),
        (LOGITS, [0, 1, 2, 3, -1], None, ("the label -1", "0 to 3")),
        (torch.zeros(5, 2, 2), LABELS, None, ("(2, 2, 2)", "(N, classes)")),
        (torch.zeros(5), LABELS, None, ("(2,)", "(N, classes)")),
        (torch.zeros(5, 1), LABELS, None, ("(2, 1)", "(N, classes)")),
        (torch.zeros(5, 1), None, "cosine", ("one number", "error")),
        (torch.zeros(5, 2), None, "error", ("all zero",)),
        (torch.full((5, 2), math.nan), None, "cosine", ("NaN",)),
        (torch.full((5, 2), math.inf), None, "cosine", ("not a number",)),
        (LOGITS, LABELS, "acuracy", ("no metric of that name", "topK")),
        (LOGITS, LABELS, "top0", ("no metric of that name",)),
    ],
)
def test_what_cannot_be_scored(
    table: Any, labels: list[int] | None, metric: str | None, words: tuple[str, ...]
) -> None:
    with refuses(*words):
        Scorer(Given(table), rows(5, labels), metric)


def test_labels_must_be_class_numbers_for_accuracy() -> None:
    x = torch.arange(5.0)[:, None]
    for labels in (torch.rand(5), torch.zeros(5, 4, dtype=torch.int64)):
        with refuses("class number"):
            Scorer(Given(LOGITS), from_tensors(x, labels), "accuracy")


def test_outputs_must_be_numbers_of_the_batch() -> None:
    for wrap in (lambda x: x.long(), lambda x: None, lambda x: x.sum(), lambda x: x[:1].T):
        with refuses("floating-point"):
            Scorer(Given(LOGITS, wrap), rows(5, LABELS))
    with refuses("(2, 3)", "(2, 4)"):
        evaluate(Given(LOGITS), [Given(torch.ones(5, 3))], rows(5), "error")


METRICS = """
import torch
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

def share(outputs, labels, args, kwargs):
    assert set(kwargs) == set() and len(args) == 1
    return (outputs.argmax(1) == labels).float().mean()

def loss(outputs, labels, args, kwargs):
    return torch.nn.functional.cross_entropy(outputs, labels).item()
loss.higher_is_better = False

made = MulticlassAccuracy(4, average="micro")
MSE = MeanSquaredError
words = "no metric"

def broken(outputs, labels, args, kwargs):
    raise ValueError("mine")

def many(outputs, labels, args, kwargs):
    return outputs
"""


def test_metrics_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(METRICS)
    data = rows(5, LABELS)

    def scored(name: str) -> Score:
        return evaluate(Given(LOGITS), [Given(LOGITS)], data, f"{tmp_path}/m.py:{name}")[0]

    for name in ("share", "made"):
        found = scored(name)
        assert found.before == found.after == pytest.approx(3 / 5)
        assert found.higher_is_better
    loss = scored("loss")
    expected = nn.functional.cross_entropy(torch.tensor(LOGITS).float(), torch.tensor(LABELS))
    assert loss.after == pytest.approx(float(expected), rel=1e-6)
    assert not loss.higher_is_better
    for name, words in (
        ("words", "a str"),
        ("broken", "ValueError: mine"),
        ("many", "fails with"),
        ("MSE", "fails with"),
        ("none", "no 'none'"),
    ):
        with refuses("m.py", words):
            scored(name)


def test_a_torchmetrics_class_is_made(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(METRICS)
    data = from_tensors(torch.arange(2.0)[:, None], torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    model = Given([[1.0, 2.0], [3.0, 4.0]])
    found = evaluate(model, [Given([[1.0, 2.0], [3.0, 5.0]])], data, f"{tmp_path}/m.py:MSE")[0]
    assert found.before == pytest.approx(1 / 4)
    assert found.after == 0
    assert not found.higher_is_better
