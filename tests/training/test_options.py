"""Each setting does what it says, seen in what the run does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import TrainingError
from bp_convert.training import engine as engines
from bp_convert.training.optimizers import make_optimizer, make_schedule, parameter_groups
from bp_convert.training.recompute import recompute, undo
from bp_convert.values.training import Training
from tests.training import runs


def train(model: nn.Module | None = None, **asked: Any) -> tuple[nn.Module, Any]:
    return bp_convert.finetune(model or runs.plain(), runs.data(), **{"epochs": 2, **asked})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict()


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(weights(one)[k], weights(two)[k]) for k in weights(one))


def gap(one: nn.Module, two: nn.Module) -> float:
    return max(float((weights(one)[k] - weights(two)[k]).abs().max()) for k in weights(one))


def test_training_lowers_the_loss_and_leaves_the_model_and_the_generators() -> None:
    model = runs.Digest().eval()
    model.body[2].train()
    before, state = {k: v.clone() for k, v in weights(model).items()}, torch.get_rng_state()
    trained, report = train(model, epochs=5, lr=0.01)
    assert report.after["loss"] < report.before["loss"]
    assert report.after["accuracy"] > report.before["accuracy"]
    assert type(trained) is runs.Digest
    assert all(torch.equal(before[k], v) for k, v in weights(model).items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in trained.modules()] == [m.training for m in model.modules()]
    assert all(p.grad is None for p in trained.parameters())
    assert report.examples == 5 * 180
    assert len(report.curve) == report.steps == 5 * 3


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{}, {"precision": "bf16"}, {"recompute": True}, {"ema": 0.9}])
def test_the_result_bears_no_trace_of_its_training(asked: dict[str, Any]) -> None:
    model = Tower()
    trained, _ = train(model, **asked)
    for (name, one), two in zip(model.named_modules(), trained.modules(), strict=True):
        assert vars(one).keys() - {"_compiled_call_impl"} == vars(two).keys() - {
            "_compiled_call_impl"
        }, name
        assert not two._forward_hooks


@pytest.mark.slow
def test_the_same_seed_is_the_same_run() -> None:
    model = runs.Digest()
    assert same(train(model)[0], train(model)[0])
    assert not same(train(seed=1)[0], train(seed=2)[0])


@pytest.mark.slow
def test_steps_and_fractions_of_epochs() -> None:
    assert train(epochs=None, steps=4)[1].steps == 4
    assert train(epochs=0.5, batch=10)[1].steps == 9
    with pytest.raises(TrainingError, match="give one of them"):
        train(epochs=1, steps=1)


@pytest.mark.slow
def test_accumulated_passes_are_one_large_batch() -> None:
    large = train(batch=60, optimizer="SGD")[0]
    parts = train(batch=20, accumulate=3, optimizer="SGD")[0]
    assert gap(large, parts) < 1e-6  # float32 sums in another order
    assert gap(large, train(batch=20, optimizer="SGD")[0]) > 1e-4
    uneven = train(batch=50, accumulate=10, optimizer="SGD", epochs=1)[0]  # 3 * 50 + 30
    assert gap(uneven, train(batch=180, optimizer="SGD", epochs=1)[0]) < 1e-6


@pytest.mark.slow
def test_clipping_bounds_a_step() -> None:
    start = runs.plain()
    moved = gap(start, train(start, steps=1, epochs=None, optimizer="SGD", lr=1.0, clip=1e-3)[0])
    free = gap(start, train(start, steps=1, epochs=None, optimizer="SGD", lr=1.0, clip=None)[0])
    assert moved <= 1e-3 < free


@pytest.mark.slow
def test_bf16_computes_in_it_and_keeps_float32_weights() -> None:
    plain, half = train(lr=0.01), train(lr=0.01, precision="bf16")
    assert all(v.dtype == torch.float32 for v in weights(half[0]).values())
    assert half[1].curve != plain[1].curve
    assert half[1].curve[-1][1] == pytest.approx(plain[1].curve[-1][1], rel=0.05)


def test_fp16_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="no CUDA device"):
        train(precision="fp16")


@pytest.mark.gpu
def test_fp16_scales_its_losses() -> None:
    trained, report = train(precision="fp16", lr=0.01, epochs=4)
    assert report.after["loss"] < report.before["loss"]
    assert all(bool(v.isfinite().all()) for v in weights(trained).values())


@pytest.mark.slow
def test_the_average_of_the_weights_is_what_is_returned() -> None:
    plain = train(lr=0.05, validation=0.0)[0]
    slow = train(lr=0.05, validation=0.0, ema=0.999)[0]
    start = runs.plain()
    assert gap(start, slow) < 0.05 * gap(start, plain)


@pytest.mark.slow
def test_the_best_weights_are_kept_even_those_before_the_first_step() -> None:
    good = train(epochs=8, lr=0.02)[0]
    points, labels = runs.data()
    wrong = points, (labels + 1) % 4
    true = points.flip(0), labels.flip(0)
    ruined, report = bp_convert.finetune(good, wrong, validation=true, epochs=2, lr=0.01)
    assert report.best_step == 0
    assert same(ruined, good)
    assert report.after == report.before
    assert any("as given; try a lower lr" in note for note in report.notes)
    last, _ = bp_convert.finetune(good, wrong, validation=0.0, epochs=2, lr=0.01)
    assert not same(last, good)


@pytest.mark.slow
def test_patience_stops_early() -> None:
    good = train(epochs=8, lr=0.02)[0]
    points, labels = runs.data()
    _, report = bp_convert.finetune(
        good,
        (points, (labels + 1) % 4),
        validation=(points.flip(0), labels.flip(0)),
        epochs=50,
        lr=0.01,
        patience=3,
    )
    assert "no lower validation loss in 3" in report.stopped
    assert report.steps == 3 * 4


def test_validation_by_steps() -> None:
    seen: list[str] = []
    train(validate_every=2, epochs=2, progress=lambda words, *_: seen.append(words))
    assert seen.count("validating") == 1 + 3  # at the start, and at steps 2, 4, 6


def test_factors_have_a_rate_and_a_decay_of_their_own() -> None:
    small, _ = runs.converted()
    settings = Training(lr=0.1, factor_lr=0.2, weight_decay=0.3, factor_decay=0.4)
    groups = {one["name"]: one for one in make_optimizer(small, settings).param_groups}
    assert {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "factors": (0.2, 0.4), "weights": (0.1, 0.3), "rest": (0.1, 0.0),
    }  # fmt: skip
    assert {id(p) for p in groups["factors"]["params"]} == {id(small[0].w1), id(small[0].w2)}
    assert {id(p) for p in groups["weights"]["params"]} == {id(small[2].weight)}
    assert len(groups["rest"]["params"]) == 2
    frozen = runs.plain().requires_grad_(False)
    with pytest.raises(TrainingError, match="no parameter that requires a gradient"):
        train(frozen)
    frozen[2].bias.requires_grad_(True)
    assert {name: len(ones) for name, ones in parameter_groups(frozen).items()} == {
        "factors": 0, "weights": 0, "rest": 1,
    }  # fmt: skip


def test_optimisers_by_name_and_by_import() -> None:
    model = runs.plain()
    made = make_optimizer(
        model, Training(optimizer="sgd", optimizer_options={"momentum": 0.9, "nesterov": True})
    )
    assert type(made) is torch.optim.SGD
    assert made.defaults["momentum"] == 0.9
    assert type(make_optimizer(model, Training(optimizer="torch.optim:NAdam"))) is torch.optim.NAdam
    with pytest.raises(TrainingError, match="did you mean AdamW"):
        make_optimizer(model, Training(optimizer="AdmW"))
    with pytest.raises(TrainingError, match="did you mean momentum"):
        make_optimizer(model, Training(optimizer="SGD", optimizer_options={"momentun": 1}))
    with pytest.raises(TrainingError, match="cannot be imported"):
        make_optimizer(model, Training(optimizer="nowhere.at_all:Thing"))


def half_down(done: float) -> float:
    return 1 - done / 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "cosine"}, [(1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]),
        ({"schedule": "step"}, [1, 1, 0.1, 0.01, 0.01]),
        ({"schedule": "linear", "warmup": 0.5}, [1 / 3, 2 / 3, 1, 0.5, 0]),
        ({"schedule": f"{__name__}:half_down"}, [1, 0.875, 0.75, 0.625, 0.5]),
        ({"schedule": "StepLR", "schedule_options": {"step_size": 2}}, [1, 1, 0.1, 0.1, 0.01]),
        ({"schedule": "LinearLR", "schedule_options": {"start_factor": 0.5}},
         [0.5, 0.625, 0.75, 0.875, 1]),
    ],
)  # fmt: skip
def test_schedules(settings: dict[str, Any], expected: list[float]) -> None:
    optimizer = torch.optim.SGD(runs.plain().parameters(), lr=1.0)
    schedule = make_schedule(optimizer, Training(**settings), 4)
    found = []
    for _ in expected:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(expected)


def test_an_unknown_schedule_is_named() -> None:
    optimizer = torch.optim.SGD(runs.plain().parameters(), lr=1.0)
    with pytest.raises(TrainingError, match="did you mean cosine"):
        make_schedule(optimizer, Training(schedule="cosin"), 4)


def test_the_presets_are_the_paper_s_and_give_way() -> None:
    paper = Training(preset="paper")
    assert (paper.optimizer, paper.lr, paper.augment) == ("Adam", 1e-3, "paper")
    assert paper.optimizer_options["betas"] == (0.9, 0.999)
    assert Training(preset="paper", lr=0.1).lr == 0.1
    captioner = Training(preset="paper-captioner")
    made = make_optimizer(runs.plain(), captioner)
    assert type(made) is torch.optim.RMSprop
    assert made.defaults["alpha"] == 0.9
    assert Training.model_validate_json(paper.model_dump_json()).lr == paper.lr


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(TrainingError, match="did you mean 'accumulate'"):
        train(acumulate=2)
    with pytest.raises(TrainingError, match="did you mean 'temperature'"):
        train(distill={"temprature": 2})
    with pytest.raises(TrainingError, match="no data"):
        bp_convert.finetune(runs.plain())


class Tower(nn.Module):
    """Blocks with batch norm and dropout, which recomputing must not run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(3)
        )
        self.tail = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.tail(x)
        return out


@pytest.mark.slow
def test_recomputing_changes_memory_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = Tower()
    plain, again = (train(model, recompute=one, lr=0.01) for one in (False, True))
    assert same(plain[0], again[0])
    assert again[1].estimated_memory_bytes < plain[1].estimated_memory_bytes
    assert "forward" not in vars(again[0].tail)
    changed = recompute(model)
    assert len(changed) == 4
    undo(changed)
    assert all("forward" not in vars(one) for one in model.modules())


def test_a_model_without_blocks_says_that_it_recomputes_nothing() -> None:
    assert any("recompute" in note for note in train(recompute=True)[1].notes)


@pytest.mark.slow
def test_compiling_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile_ = nn.Module.compile

    def spy(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compiled.append(self)
        compile_(self, backend="eager")  # the compiler itself is torch's, and takes a minute

    monkeypatch.setattr(nn.Module, "compile", spy)
    plain, quick = train(lr=0.01)[0], train(lr=0.01, compile=True)[0]
    assert len(compiled) == 1
    assert gap(plain, quick) < 1e-6
    assert quick._compiled_call_impl is None


@pytest.mark.slow
def test_memory_is_estimated_and_measured() -> None:
    model = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 4))
    _, report = train(model, epochs=1, batch=64)
    size = 4 * sum(p.numel() for p in model.parameters())
    # Weights, gradients, two states of Adam, what the pass keeps, and gradients on their way
    wide = 4 * 64 * 512
    kept = wide + 4 * 64 * 16
    assert report.estimated_memory_bytes == pytest.approx(4 * size + kept + 2 * wide, rel=0.05)
    assert report.peak_memory_bytes == pytest.approx(report.estimated_memory_bytes, rel=0.2)
    _, plain = train(model, epochs=1, optimizer="SGD", batch=64)
    assert report.estimated_memory_bytes - plain.estimated_memory_bytes == pytest.approx(
        2 * size, rel=0.02
    )


@pytest.mark.slow
def test_what_happens_is_logged_and_shown_to_tensorboard(tmp_path: Path) -> None:
    import json

    words: list[tuple[str, int, int]] = []
    _, report = train(folder=tmp_path, progress=lambda *said: words.append(said))
    entries = [json.loads(one) for one in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(e["step"], e["loss"]) for e in entries if "loss" in e] == list(report.curve)
    assert next(e["validation"] for e in entries if "validation" in e) == report.before
    assert {"lr", "norm", "rate"} <= {key for e in entries for key in e}
    assert any("accuracy" in one[0] and "/s" in one[0] for one in words)
    assert words[-1][1:] == (report.steps, report.steps)
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(events))
    found.Reload()
    assert [one.step for one in found.Scalars("train/loss")] == [s for s, _ in report.curve]
    assert [one.value for one in found.Scalars("train/loss")] == pytest.approx(
        [loss for _, loss in report.curve]
    )


def test_half_weights_are_refused() -> None:
    with pytest.raises(TrainingError, match="float32 weights"):
        train(runs.plain().to(torch.bfloat16))


def test_one_run_s_precision_does_not_bind_the_next() -> None:
    for precision in ("bf16", "no"):
        made = engines.Engine(Training(precision=precision))
        assert made.mixed_precision == precision


@pytest.mark.slow
def test_a_teacher_that_writes_on_its_own_weights_stays_as_it_is() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = runs.plain()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.body[0].weight.mul_(0.99)
            out: Tensor = self.body(x)
            return out

    teacher = Counting()
    before = {key: value.clone() for key, value in teacher.state_dict().items()}
    bp_convert.finetune(runs.plain(), runs.data(), teacher=teacher, steps=2)
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())
