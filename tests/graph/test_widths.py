"""Which layers are widened together, what follows, and what the plan says of the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import bp_convert
from bp_convert.graph.walk import walk
from bp_convert.kinds import KINDS
from bp_convert.widths.plan_writer import TargetWidth, WidthPlan
from bp_convert.widths.widen import widen
from tests.tiny_models import TINY, Chain, Tied

# Inputs and outputs of every layer at alpha 2, worked out by hand: Linear, Embedding and LSTM
# twice as wide, convolutions four times, a group that mixes them twice.
AT_ALPHA_2: dict[str, dict[str, tuple[int, int]]] = {
    "chain": {"first": (6, 24), "second": (24, 40), "head": (40, 5)},
    "residual": {"stem": (3, 32), "inner": (32, 48), "outer": (48, 32), "head": (32, 5)},
    "concat": {"left": (3, 32), "right": (3, 48), "joined": (80, 64), "head": (64, 5)},
    "flatten": {"conv": (3, 32), "hidden": (512, 48), "head": (48, 5)},
    "mixed": {"conv": (3, 16), "linear": (3, 16), "head": (16, 5)},
    "depthwise": {"expand": (3, 48), "depth": (48, 48), "project": (48, 32), "head": (32, 5)},
    "grouped": {"stem": (3, 32), "grouped": (32, 12), "last": (12, 64), "head": (64, 5)},
    "shared": {"stem": (6, 24), "once": (24, 24), "head": (24, 5)},
    "tied": {"words": (30, 24), "inner": (24, 40), "outer": (40, 24), "decoder": (24, 30)},
    "recurrent": {"words": (30, 24), "lstm": (24, 20), "head": (40, 5)},
    "packed": {"words": (30, 24), "lstm": (24, 20), "head": (20, 5)},
    "projected": {"stem": (6, 24), "gru": (24, 20), "cell": (20, 16), "head": (16, 5)},
    "two inputs": {
        "image": (7, 24),
        "words": (30, 32),
        "language": (32, 20),
        "meaning": (20, 24),
        "head": (24, 30),
    },
    "keyword": {"words": (30, 24), "inner": (24, 40), "head": (40, 5)},
    "unknown": {"first": (6, 24), "second": (24, 16), "third": (16, 40), "head": (40, 5)},
    "branching": {"first": (6, 12), "head": (12, 5)},
    "normed": {"conv": (3, 32), "up": (32, 24), "head": (24, 5)},
    "split": {"stem": (3, 32), "side": (16, 16), "head": (32, 5)},
    "hard view": {"conv": (3, 8), "hidden": (128, 48), "head": (48, 5)},
    "attention": {"stem": (6, 48), "qkv": (48, 144), "out": (48, 48), "head": (48, 5)},
    "fused": {"stem": (6, 48), "attention": (48, 48), "mlp": (48, 48), "head": (48, 5)},
    "functional": {"first": (6, 24), "used": (24, 24), "head": (24, 5)},
    "sides": {
        "stem": (6, 24),
        "side": (24, 40),
        "extra": (40, 5),
        "spare": (12, 7),
        "head": (24, 5),
    },
    "stateful": {"stem": (6, 24), "head": (24, 5)},
}


def every_layer(model: nn.Module) -> dict[str, str]:
    return {site.name: site.kind.name for site in walk(model)}


def widened(name: str, alpha: float, *, without: tuple[str, ...] = ()) -> WidthPlan:
    tiny = TINY[name]
    model = tiny.make()
    args, kwargs = tiny.inputs()
    targets = {n: k for n, k in every_layer(model).items() if n not in without}
    return widen(model, args, kwargs, alpha=alpha, targets=targets)


def sizes(plan: WidthPlan) -> dict[str, tuple[int, int]]:
    return {name: (t.inputs[1], t.outputs[1]) for name, t in plan.targets.items()}


def test_every_tiny_model_is_worked_out() -> None:
    assert AT_ALPHA_2.keys() == TINY.keys()


@pytest.mark.parametrize("name", TINY)
def test_widths_at_alpha_2(name: str) -> None:
    plan = widened(name, 2)
    assert sizes(plan) == AT_ALPHA_2[name]
    assert (plan.failure is None) == (name != "branching")


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("alpha", [1, 1.5, 3])
def test_other_alphas_scale_the_same_layers(name: str, alpha: float) -> None:
    model = TINY[name].make()
    plan = widened(name, alpha)
    squared = {kind.name for kind in KINDS if kind.squared}
    for layer, (_, outputs) in AT_ALPHA_2[name].items():
        before = plan.targets[layer].outputs[0]
        kind = every_layer(model)[layer]
        ratio = outputs / before
        if alpha == 1.5 and name in ("attention", "fused", "split", "normed"):
            continue  # below
        factor = {1.0: 1.0, 2.0: alpha, 4.0: alpha**2}[ratio]
        assert plan.targets[layer].outputs[1] == int(before * factor + 0.5)
        assert ratio != 4 or kind in squared


def test_fractional_alpha_keeps_heads_and_halves_whole() -> None:
    assert sizes(widened("attention", 1.5)) == {
        "stem": (6, 36),
        "qkv": (36, 108),
        "out": (36, 36),
        "head": (36, 5),
    }
    plan = widened("split", 1.5)
    assert plan.failure is None
    assert plan.targets["stem"].outputs[1] % 2 == 0


def test_a_width_that_rounds_apart_from_its_divisor_stays() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 14)
            self.head = nn.Linear(14, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x).view(-1, 2, 7 * 2 // 2).flatten(1))

    class Even(Halves):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(x.view(len(x), 2, x.shape[1] // 2).flatten(1))

    inputs = (torch.randn(2, 6),)
    plan = widen(Even(), inputs, {}, alpha=1.5, targets=every_layer(Even()))
    assert plan.targets["stem"].outputs[1] == 14  # 21 is odd
    assert "stem(x)" not in (plan.targets["stem"].reason or "")
    assert "view(len(x), 2, x.shape[1] // 2)" in (plan.targets["stem"].reason or "")
    plan = widen(Halves(), inputs, {}, alpha=2, targets=every_layer(Halves()))
    assert plan.targets["stem"].outputs[1] == 14


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("chain", "head", "it reaches the model's output, axis 1"),
        ("keyword", "head", "it reaches the model's output 'logits', axis 1"),
        ("sides", "extra", "it reaches the model's output 1, axis 1"),
        ("sides", "spare", "never called on the example input"),
        ("tied", "decoder", "fixed to 30 by decoder.weight and words.weight are one tensor (tied)"),
        ("unknown", "second", "fixed to 16 by `x = x @ table` at tiny_models.py"),
        ("hard view", "conv", "fixed to 8 by `x = x.view(-1, 128)` at tiny_models.py"),
        ("branching", "first", "`if x.sum() > 0:` at tiny_models.py"),
        ("branching", "first", "depends on numbers that it computes"),
        ("grouped", "grouped", "it follows the layers around it"),
    ],
)
def test_reasons_name_the_cause(name: str, layer: str, words: str) -> None:
    reason = widened(name, 2).targets[layer].reason
    assert reason is not None
    assert words in reason


@pytest.mark.slow
def test_reasons_hold_no_symbols() -> None:
    for name in TINY:
        for target in widened(name, 2).targets.values():
            assert target.reason is None or not any(
                f"s{digit}" in target.reason or "//" in target.reason for digit in range(10)
            )


@pytest.mark.slow
def test_a_layer_is_widened_or_has_a_reason() -> None:
    for name in TINY:
        for target in widened(name, 2).targets.values():
            grew = target.outputs[1] != target.outputs[0]
            assert grew == (target.reason is None), target


def test_what_is_not_selected_keeps_its_output_and_takes_wider_input() -> None:
    plan = widened("chain", 2, without=("second",))
    assert plan.targets["second"] == TargetWidth((12, 24), (20, 20), "not selected")
    assert plan.targets["head"].inputs[1] == 20


def test_a_partner_that_is_not_selected_holds_its_group() -> None:
    plan = widened("residual", 2, without=("outer",))
    assert plan.targets["stem"].outputs[1] == 8
    assert plan.targets["stem"].reason == "outer is not selected"
    assert plan.targets["inner"].outputs[1] == 48


def test_alpha_1_changes_nothing_but_still_looks() -> None:
    plan = widened("sides", 1)
    assert plan.resizes == ()
    assert plan.attrs == ()
    assert plan.failure is None


def test_a_failure_keeps_every_width() -> None:
    class Odd(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x if float(x.sum()) > 0 else -x

    plan = widen(Odd(), (torch.randn(2, 6),), {}, alpha=1, targets={})
    assert plan.failure is not None
    assert sizes(plan)["first"] == (6, 12)


def test_axes_follow_what_they_are_made_of() -> None:
    found = {one.name: one.after for one in widened("flatten", 2).resizes}
    assert found["conv.weight"] == (32, 3, 3, 3)
    assert found["hidden.weight"] == (48, 16 * 32)
    assert found["head.weight"] == (5, 48)
    assert "head.bias" not in found
    found = {one.name: one.after for one in widened("concat", 2).resizes}
    assert found["joined.weight"][1] == found["left.weight"][0] + found["right.weight"][0]


@pytest.mark.slow
def test_followers_and_positional_parameters_are_resized() -> None:
    found = {one.name: (one.before, one.after) for one in widened("residual", 3).resizes}
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert found[f"norm.{name}"] == ((8,), (72,))
    places = {one.name: one.after for one in widened("keyword", 3).resizes}["places"]
    assert places == (1, 16, 36)
    normed = {one.name: one.after for one in widened("normed", 2).resizes}
    assert normed["group.weight"] == normed["slope.weight"] == (32,)
    assert normed["up.weight"] == (32, 24, 2, 2)


def test_attributes_of_the_users_modules_follow() -> None:
    attrs = {(a.module, a.attr): (a.before, a.after) for a in widened("packed", 2).attrs}
    assert attrs["", "hidden"] == (10, 20)
    attrs = {(a.module, a.attr): (a.before, a.after) for a in widened("attention", 2).attrs}
    assert attrs["", "head_dim"] == (8, 16)
    assert ("", "num_heads") not in attrs
    attrs = {(a.module, a.attr): (a.before, a.after) for a in widened("depthwise", 2).attrs}
    assert attrs["depth", "groups"] == (12, 48)


def test_tied_tensors_are_resized_once_under_their_first_name() -> None:
    names = [one.name for one in widened("tied", 2).resizes]
    assert "words.weight" in names
    assert "decoder.weight" not in names


def test_parametrised_layers_are_left_alone() -> None:
    model = Chain()
    weight_norm(model.second)
    plan = widen(model, (torch.randn(2, 6),), {}, alpha=2, targets=every_layer(model))
    assert plan.failure is None
    assert plan.targets["second"].outputs[1] == 20
    assert plan.targets["second"].reason == "its weight is parametrised"
    assert plan.targets["first"].outputs[1] == 12
    assert plan.targets["head"].outputs[1] == 5


def test_what_fails_at_another_width_is_isolated() -> None:
    class Picky(nn.Module):
        """Refuses any width but its own, without ever comparing sizes."""

        def forward(self, x: Tensor) -> Tensor:
            if str(x.shape[1]).isdigit() and "12" not in str(x.shape[1]):
                raise RuntimeError("only 12 will do")
            return x

    model = nn.Sequential(nn.Linear(6, 12), Picky(), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5))
    plan = widen(model, (torch.randn(2, 6),), {}, alpha=2, targets=every_layer(model))
    assert plan.failure is None
    assert sizes(plan) == {"0": (6, 12), "2": (12, 40), "4": (40, 5)}
    assert "only 12 will do" in (plan.targets["0"].reason or "")


def test_same_model_same_plan() -> None:
    assert widened("residual", 2) == widened("residual", 2)


def test_a_model_that_cannot_be_copied_is_a_failure_in_words() -> None:
    class Stuck(Tied):
        def __deepcopy__(self, memo: object) -> Stuck:
            raise TypeError("not me")

    plan = widen(Stuck(), (torch.zeros(2, 3, dtype=torch.long),), {}, alpha=2, targets={})
    assert "cannot be copied" in (plan.failure or "")


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: torch.cat([x[:, :4], x[:, 4:]], 1),
        lambda x: x[:, torch.tensor([3, 1, 2, 0, 5, 4, 7, 6, 9, 8, 11, 10])],
        lambda x: x.index_select(1, torch.arange(11, -1, -1)),
        lambda x: x + x[:, :1],
        lambda x: x + x[:, 3][:, None],
    ],
)
def test_channels_picked_by_number_fix_their_width(pick: Callable[[Tensor], Tensor]) -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 12)
            self.inner = nn.Linear(12, 20)
            self.head = nn.Linear(20, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(pick(self.stem(x))))

    model = Picking()
    plan = widen(model, (torch.randn(2, 6),), {}, alpha=2, targets=every_layer(model))
    assert sizes(plan) == {"stem": (6, 12), "inner": (12, 40), "head": (40, 5)}
    assert "fixed to 12 by `lambda x:" in (plan.targets["stem"].reason or "")


def test_halves_taken_by_size_do_not_fix_it() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 12)
            self.head = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            half = x.shape[1] // 2
            return self.head(x[:, :half] * x[:, half:].sigmoid())

    model = Gated()
    plan = widen(model, (torch.randn(2, 6),), {}, alpha=3, targets=every_layer(model))
    assert plan.failure is None
    assert sizes(plan) == {"stem": (6, 36), "head": (18, 5)}


class Splits(nn.Module):
    """Keeps the widths of its branches in a list, as timm's MixedConv2d does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.splits = [16, 16]
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in self.splits)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.stem(x).split(self.splits, -1)
        pairs = zip(self.branches, parts, strict=True)
        return self.head(torch.cat([branch(part) for branch, part in pairs], -1))


def test_widths_in_a_list_stay_in_a_list() -> None:
    torch.manual_seed(0)
    model = Splits().eval()
    small, _ = bp_convert.convert(model, inputs=["16"], alpha=2, convert_anyway=True)
    assert model.splits == [16, 16]
    assert small.splits == [32, 32]
    assert small.stem.out_features == 64
    assert small(torch.randn(3, 16)).shape == (3, 4)


class Messages(nn.Module):
    """Adds rows up by index, into zeros as wide as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.out = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sent = self.message(nodes[edges[0]])
        return self.out(torch.zeros_like(nodes).index_add(0, edges[1], sent))


def test_rows_that_are_added_by_index_keep_their_width() -> None:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 5, 4, 3], [5, 4, 3, 2, 0]])
    inputs = {"nodes": torch.randn(6, 16), "edges": edges}
    small, _ = bp_convert.convert(Messages().eval(), inputs=inputs, alpha=2, convert_anyway=True)
    assert small.message[0].out_features > 32
    assert small.message[2].out_features == 16
    assert small(**inputs).shape == (6, 3)
