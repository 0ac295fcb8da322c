"""Nothing is kept that is worse on held-out examples; what is done is not done again."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import bp_convert
from bp_convert import pipeline
from bp_convert.cli.app import app
from bp_convert.cli.reading import settings_from
from bp_convert.errors import PlanError
from bp_convert.graph.clone import clone
from bp_convert.reconstruction import blockwise, reconstruct, tuning
from bp_convert.reconstruction.effort import epochs_of
from bp_convert.surgery import apply_plan
from bp_convert.values.plan import Plan
from bp_convert.values.reconstruction import Reconstruct
from bp_convert.values.settings import Settings


def network(seed: int) -> nn.Module:
    """Return a small network of random form."""
    torch.manual_seed(seed)
    widths = [int(n) for n in torch.randint(4, 17, (4,))]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bool(seed % 2)), nn.Tanh()]
    if seed % 3 == 0:
        body = [nn.Sequential(nn.Linear(widths[-1], widths[-1]), nn.ReLU()) for _ in range(2)]
        layers.append(nn.Sequential(*body, nn.BatchNorm1d(widths[-1])))
    return nn.Sequential(*layers).eval()


def error(model: nn.Module, small: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        want, got = model(x), small.eval()(x)
        return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("part", range(5))
def test_the_held_out_error_never_rises(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "Done", Undone)
    tuned = 0
    for seed in range(10 * part, 10 * part + 10):
        model = network(seed)
        x = torch.randn(24, next(model.parameters()).shape[1])
        x = x @ torch.randn(x.shape[1], x.shape[1])
        rate = (1e-3, 0.1, 30.0)[seed % 3]  # sane, bold, absurd
        asked = {"epochs": 1, "lr": rate, "held_out": 0.3, "end_to_end": 1}
        rank = {"rank": 0.4, "convert_anyway": True, "inputs": [f"{x.shape[1]}"]}
        plan = bp_convert.plan(model, **rank, reconstruct=asked)
        plain = apply_plan(model, plan).model
        small = clone(plain)
        found = reconstruct(model, small, plan, [((x,), {})])
        if found is None:  # nothing was converted
            continue
        for one in found.blocks:
            assert one.before is None or one.after <= one.before
            assert not one.kept or one.after < one.before
        if not found.kept:
            for a, b in zip(plain.parameters(), small.parameters(), strict=True):
                assert torch.equal(a, b)
            continue
        tuned += 1
        assert found.before is not None
        assert found.after < found.before
        held = x[-found.held :]  # the same as a user computes it: the last examples judge
        assert error(model, plain, held) == pytest.approx(found.before, rel=1e-3)
        assert error(model, small, held) == pytest.approx(found.after, rel=1e-3)
    assert tuned


class Undone:
    """Keeps nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def read(self, _: int) -> None:
        return None

    def write(self, *_: object) -> None:
        pass


def deep() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    return model.eval(), torch.randn(120, 16) @ torch.randn(16, 16)


def how(x: Tensor, **asked: object) -> dict[str, object]:
    return {
        "target": "params=0.5",
        "convert_anyway": True,
        "calibrate": x,
        "sides": "inputs",
        "reconstruct": {"epochs": 8, **asked},
    }


def started(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return where copies of models are put as they are before blocks are tuned."""
    found: list[nn.Module] = []
    tuned = pipeline.reconstruct

    def kept(source: nn.Module, converted: nn.Module, *rest: Any, **more: Any) -> Any:
        found.append(clone(converted))
        return tuned(source, converted, *rest, **more)

    monkeypatch.setattr(pipeline, "reconstruct", kept)
    return found


def test_blocks_that_make_the_model_worse_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = deep()
    before = started(monkeypatch)
    errors = iter([0.1, 0.2])
    monkeypatch.setattr(blockwise._Course, "_error", lambda _: next(errors))
    small, report = bp_convert.convert(model, **how(x))
    assert report.reconstruction is not None
    assert not report.reconstruction.kept
    assert "all blocks went back" in report.reconstruction.reason
    for a, b in zip(before[0].parameters(), small.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_goes_wrong_leaves_a_block_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = deep()
    before = started(monkeypatch)

    def failing(_: object, parameters: list[nn.Parameter], *__: object, **___: object) -> None:
        parameters[0].data.zero_()
        raise RuntimeError("no gradient for this\nand more")

    monkeypatch.setattr(blockwise, "tune", failing)
    small, report = bp_convert.convert(model, **how(x, lr=1e-5))
    assert report.reconstruction is not None
    assert {one.reason for one in report.reconstruction.blocks} == {
        "it does not run with gradients: no gradient for this"
    }
    for a, b in zip(before[0].parameters(), small.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_would_take_long_is_left_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blockwise, "LONG", -1.0)
    model, _ = deep()
    x = torch.randn(160, 16)
    plan = bp_convert.plan(model, **{**how(x), "reconstruct": None})
    small = apply_plan(model, plan).model
    before = [one.clone() for one in small.parameters()]
    said: list[str] = []
    found = reconstruct(
        model, small, plan, [((x,), {})], progress=lambda words, *_: said.append(words)
    )
    assert found is not None
    assert "--reconstruct does it" in found.reason
    assert all(map(torch.equal, before, small.parameters()))
    monkeypatch.setattr(blockwise, "LONG", 1800.0)
    found = reconstruct(
        model, small, plan, [((x,), {})], progress=lambda words, *_: said.append(words)
    )
    assert found is not None
    assert found.blocks
    assert any(one.endswith(" s left: 0") for one in said)


def test_a_run_that_was_killed_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path / "whole"))
    model, x = deep()
    whole, _ = bp_convert.convert(model, **how(x))
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path / "parts"))
    real, done = tuning.tune, []

    def killed(*args: object, **more: object) -> object:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return real(*args, **more)

    monkeypatch.setattr(blockwise, "tune", killed)
    with pytest.raises(KeyboardInterrupt):
        bp_convert.convert(model, **how(x))
    monkeypatch.setattr(blockwise, "tune", real)
    small, report = bp_convert.convert(model, **how(x))
    assert report.reconstruction is not None
    assert report.reconstruction.resumed == 2
    for a, b in zip(whole.parameters(), small.parameters(), strict=True):
        assert torch.equal(a, b)
    for path in (tmp_path / "parts").glob("blocks/*-0.safetensors"):
        path.write_bytes(b"damaged")
    _, report = bp_convert.convert(model, **how(x))
    assert report.reconstruction is not None
    assert report.reconstruction.resumed == 2
    _, report = bp_convert.convert(model, **how(x, lr=1e-4))
    assert report.reconstruction is not None
    assert report.reconstruction.resumed == 0


def test_half_precision_is_tuned_in_float32_and_frozen_weights_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = deep()
    model[2][0].requires_grad_(False)
    model.bfloat16()
    asked = {**how(x), "exclude": ["2.0"]}
    before = started(monkeypatch)
    small, report = bp_convert.convert(model, **asked)
    assert report.reconstruction is not None
    assert report.reconstruction.kept
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert torch.equal(small[2][0].weight, model[2][0].weight)
    assert error(model, small, x.bfloat16()) < error(model, before[0], x.bfloat16())


def test_it_is_done_unasked_where_that_is_judged_and_takes_minutes() -> None:
    model, x = deep()
    asked = how(x)
    asked.pop("reconstruct")
    plan = bp_convert.plan(model, **asked)
    cpu = torch.device("cpu")

    def epochs(count: int, macs: float = 1e3, **other: object) -> tuple[int, str]:
        total = plan.macs.model_copy(update={"after": int(macs)})
        settings = plan.settings.model_copy(update=other)
        changed = plan.model_copy(update={"macs": total, "settings": settings})
        return epochs_of(changed, count, cpu)

    assert epochs(512) == (20, "")
    assert epochs(127)[0] == 0
    assert "128 are enough" in epochs(127)[1]
    assert epochs(128) == (20, "")
    assert epochs(512, 1e9)[0] == 7
    assert epochs(512, 1e10) == (
        0,
        "it would take long for a model of this size (--reconstruct does it)",
    )
    assert epochs(512, 1e12, reconstruct=Reconstruct()) == (3, "")
    assert epochs(20, reconstruct=Reconstruct(epochs=50)) == (50, "")
    assert epochs(512, reconstruct="off") == (0, "")
    assert epochs(1, reconstruct=Reconstruct())[0] == 0
    _, report = bp_convert.convert(model, **asked)
    assert report.reconstruction is not None
    assert "too few" in report.reconstruction.reason
    assert "blocks  not tuned: 120 calibration examples are too few" in str(report)
    many = torch.randn(128, 16)
    _, report = bp_convert.convert(model, **{**asked, "calibrate": many})
    assert report.reconstruction is not None
    assert len(report.reconstruction.blocks) == 3
    _, report = bp_convert.convert(model, **{**asked, "calibrate": many, "method": "svd"})
    assert report.reconstruction is None  # nothing is fitted to data


def test_settings_read_switches_and_keys() -> None:
    assert Settings(reconstruct=True).reconstruct == Reconstruct()
    assert Settings(reconstruct=False).reconstruct == "off"
    read = Settings.model_validate({"reconstruct": {"blocks": "a", "end_to_end": 3}})
    assert read.reconstruct == Reconstruct(blocks=("a",), end_to_end=3)
    assert Settings.model_validate_json(read.model_dump_json()) == read
    model, x = deep()
    with pytest.raises(PlanError, match="epoch"):
        bp_convert.convert(model, **how(x, epoch=3))


def test_flags_add_to_what_a_settings_file_says(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("reconstruct: {epochs: 5, blocks: [a]}\n")
    for flag, wanted in (
        ("on", Reconstruct(epochs=5, blocks=("a",))),
        ({"epochs": 7}, Reconstruct(epochs=7, blocks=("a",))),
        ("off", "off"),
    ):
        assert settings_from(file, reconstruct=flag).reconstruct == wanted
    file.write_text("reconstruct: off\n")
    assert settings_from(file).reconstruct == "off"
    assert settings_from(file, reconstruct="on").reconstruct == Reconstruct()


def test_the_command_tunes_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = deep()
    torch.save(model, "model.pt")
    import numpy as np

    np.save("x.npy", x.numpy())
    words = ["model.pt", "--target", "params=0.5", "--convert-anyway", "--json"]
    data = ["--calibrate", "x.npy"]
    run = CliRunner().invoke
    done = run(app, [*words, *data, "--reconstruct-epochs", "8", "-o", "a.pt"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["reconstruction"]
    assert [one["name"] for one in found["blocks"]] == ["0", "1", "2"]
    assert found["after"] <= found["before"]
    plan = bp_convert.plan_of("a.pt")
    assert isinstance(plan, Plan)
    assert plan.settings.reconstruct == Reconstruct(epochs=8)
    done = run(app, [*words, *data, "--no-reconstruct", "-o", "b.pt"])
    assert json.loads(done.stdout)["reconstruction"] is None
    refused = run(app, [*words, "--reconstruct"])
    assert refused.exit_code == 2
    assert "there is none. Add" in refused.output
    refused = run(app, [*words, *data, "--no-reconstruct", "--reconstruct-epochs", "2"])
    assert refused.exit_code == 2
