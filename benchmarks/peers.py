"""Bilinear layers beside what else makes a model smaller, at equal parameters.

    python benchmarks/peers.py [--only Linear] [--share one 0.25] [--threads N] [--out FOLDER]

Beside the dense layer: two ``nn.Linear`` (low rank), the layers of TensorLy-Torch, PEFT's LoKr,
merged and unmerged, a weight built by ``torch.kron`` at each call, torchao's int8 weights, and
ours. Share ``one`` is what one term of the nearest-square pairs has, a number a share of the dense
layer's. Of whole models every layer but the last is replaced by the same kind of layer, with the
same numbers of parameters. Weights are random: time does not ask for them.

Medians of passes that take turns in one process, as ratios to dense: above 1 is faster. Writes
``peers.json`` and a page, ``peers.html``. The peers install with ``pip install '.[bench]'``; one
that is missing is left out, and said so.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import interleaved, machine
from benchmarks.timing import bert
from bp_convert.kinds import Ask, kind_of
from bp_convert.pages.chart import Bars
from bp_convert.pages.page import Note, Page, Row, Section, Table, html
from bp_convert.values.factors import FactorSpec

PEERS = {"tltorch": "tensorly-torch", "peft": "peft", "torchao": "torchao"}
LINEAR = ((512, 512), (768, 3072), (4096, 4096))
CONV = ((64, 56), (256, 14))
BATCHES = (1, 32)
LAYERS_ONLY = ("TensorLy, CP", "LoKr, unmerged", "LoKr, merged")  # minutes to build for a model
OFF = 0.15  # share by which the parameters of a contender may differ from what was asked


@dataclass(frozen=True)
class Measured:
    """One contender in one case: its parameters, and how many times faster than dense it is."""

    case: str
    share: str
    batch: int
    who: str
    params: int
    dense_us: float
    ratio: float


class Built(nn.Module):
    """A weight that ``torch.kron`` builds at each call: what a first attempt looks like."""

    def __init__(self, small: Any) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(small.w1.detach()), nn.Parameter(small.w2.detach())
        self.bias = None if small.bias is None else nn.Parameter(small.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        terms = [torch.kron(a, b.t().contiguous()) for a, b in zip(self.w1, self.w2, strict=True)]
        return F.linear(x, torch.stack(terms).sum(0), self.bias)


def ours(layer: nn.Module, params: int, *, square: bool) -> nn.Module | None:
    """Return our layer of about so many parameters: of the nearest-square pairs, or low rank.

    At a share of a trained layer the planner has square pairs among its candidates, whose many
    terms it seldom takes.
    """
    kind = kind_of(layer)
    assert kind is not None
    widths = kind.widths(layer)
    (role,) = kind.choices(layer, widths)
    if square:
        (one,) = kind.factor(layer, widths, Ask(rank=1)).values()
    else:
        if isinstance(layer, nn.Linear):
            one = FactorSpec(out=(layer.out_features, 1), inp=(1, layer.in_features), rank=1)
        else:
            assert isinstance(layer, nn.Conv2d)
            d = layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]
            one = FactorSpec(out=(layer.out_channels, 1), inp=(1, d), rank=1, axes=(2, 2))
    rank = max(1, round(params / one.params))
    (k1, k2), (d1, d2) = one.out, one.inp
    if rank > min(k1 * d1, k2 * d2):  # as many are exact
        return None
    factors = {role: one.model_copy(update={"rank": rank})}
    weight: Any = layer.weight
    return kind.build(layer, widths, factors, weight.device).eval()


def low_rank(layer: nn.Module, params: int) -> nn.Module | None:
    """Return two layers of torch's own, thin in between."""
    bias = getattr(layer, "bias", None) is not None
    if isinstance(layer, nn.Linear):
        rank = max(1, params // (layer.in_features + layer.out_features))
        return nn.Sequential(
            nn.Linear(layer.in_features, rank, bias=False),
            nn.Linear(rank, layer.out_features, bias=bias),
        )
    assert isinstance(layer, nn.Conv2d)
    inputs = layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]
    rank = max(1, params // (inputs + layer.out_channels))
    return nn.Sequential(
        nn.Conv2d(
            *(layer.in_channels, rank, layer.kernel_size),  # type: ignore[arg-type]
            **_steps(layer),
            bias=False,
        ),
        nn.Conv2d(rank, layer.out_channels, 1, bias=bias),
    )


def _steps(layer: nn.Conv2d) -> dict[str, Any]:
    return {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}


def tensorly(layer: nn.Module, params: int, *, form: str) -> nn.Module | None:
    """Return a layer of TensorLy-Torch that runs on its factors."""
    import tltorch

    bias = getattr(layer, "bias", None) is not None
    if isinstance(layer, nn.Linear):
        made = tltorch.FactorizedLinear(
            *(_thirds(layer.in_features), _thirds(layer.out_features)),
            rank=params / layer.weight.numel(),
            factorization="blocktt" if form == "tt" else form,
            implementation="factorized",
            bias=bias,
        )
    else:
        assert isinstance(layer, nn.Conv2d)
        made = tltorch.FactorizedConv(
            *(layer.in_channels, layer.out_channels, layer.kernel_size[0]),
            order=2,
            stride=layer.stride[0],
            padding=layer.padding[0],
            rank=params / layer.weight.numel(),
            factorization=form,
            implementation="factorized",
            bias=bias,
        )
    found: nn.Module = made
    return found


def _thirds(width: int) -> tuple[int, ...]:
    """Return three factors of a width, as near to each other as they come."""
    found: tuple[int, ...] = (1, 1, width)
    for a in (n for n in range(1, width + 1) if width % n == 0):
        for b in (n for n in range(a, width // a + 1) if (width // a) % n == 0):
            c = width // a // b
            if c >= b and c - a < found[2] - found[0]:
                found = (a, b, c)
    return found


def lokr(layer: nn.Module, params: int, *, merged: bool) -> nn.Module | None:
    """Return the dense layer with PEFT's Kronecker adapter of so many parameters beside it."""
    if not isinstance(layer, nn.Linear):
        return None
    import peft

    inputs, outputs = layer.in_features, layer.out_features
    for rank in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        config = peft.LoKrConfig(r=rank, target_modules=["0"], init_weights=False)
        whole = peft.get_peft_model(nn.Sequential(nn.Linear(inputs, outputs)), config)  # type: ignore[arg-type]
        added = sum(p.numel() for name, p in whole.named_parameters() if "lokr" in name)
        if added >= (1 - OFF) * params or rank >= min(inputs, outputs):
            break
    return whole.merge_and_unload().eval() if merged else whole.eval()  # type: ignore[no-any-return, operator]


def naive(layer: nn.Module, params: int) -> nn.Module | None:
    """Return our factors, with the weight built at each call."""
    small = ours(layer, params, square=True) if isinstance(layer, nn.Linear) else None
    return None if small is None else Built(small)


def int8(layer: nn.Module, params: int) -> nn.Module | None:
    """Return the dense layer with weights of 8 bits, which torchao gives."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if not isinstance(layer, nn.Linear):
        return None
    made = nn.Sequential(copy.deepcopy(layer))
    quantize_(made, Int8WeightOnlyConfig())
    return made


Contender = Callable[[nn.Module, int], nn.Module | None]
CONTENDERS: Mapping[str, tuple[str, Contender]] = {
    "ours, square pairs": ("", partial(ours, square=True)),
    "ours, low rank": ("", partial(ours, square=False)),
    "two layers, low rank": ("", low_rank),
    "TensorLy, Tucker": ("tltorch", partial(tensorly, form="tucker")),
    "TensorLy, CP": ("tltorch", partial(tensorly, form="cp")),
    "TensorLy, TT": ("tltorch", partial(tensorly, form="tt")),
    "LoKr, unmerged": ("peft", partial(lokr, merged=False)),
    "LoKr, merged": ("peft", partial(lokr, merged=True)),
    "torch.kron": ("", naive),
    "dense int8": ("torchao", int8),
}


@dataclass(frozen=True)
class Case:
    """What is measured: a module, an input of one example, whose first size is the batch."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[int], Any]
    batches: tuple[int, ...] = BATCHES
    whole: bool = False


def cases() -> Iterator[Case]:
    """Yield layers, then models."""
    for d, k in LINEAR:
        yield Case(f"Linear {d} -> {k}", partial(nn.Linear, d, k), partial(_drawn, (d,)))
    for c, size in CONV:
        conv = partial(nn.Conv2d, c, c, 3, padding=1)
        name = f"Conv2d {c} 3x3 at {size}x{size}"
        yield Case(name, conv, partial(_drawn, (c, size, size)), (1, 16))
    image = partial(_drawn, (3, 224, 224))
    yield Case("VGG-16", torchvision.models.vgg16, image, (1, 8), whole=True)
    yield Case("ResNet-50", torchvision.models.resnet50, image, (1, 8), whole=True)
    yield Case("BERT-base, 128 tokens", bert, partial(_tokens, 128), (1, 8), whole=True)


def _drawn(shape: tuple[int, ...], batch: int) -> Tensor:
    return torch.randn(batch, *shape)


def _tokens(length: int, batch: int) -> Tensor:
    return torch.randint(1000, 30000, (batch, length))


def allowed(layer: nn.Module, share: str) -> int | None:
    """Return the parameters that a layer's weight may have; None where it is left alone."""
    if share != "one":
        weight: Any = layer.weight
        return int(float(share) * weight.numel())
    small = ours(layer, 1, square=True)
    return None if small is None else small.w1.numel() + small.w2.numel()  # type: ignore[operator, union-attr]


def contender(case: Case, dense: nn.Module, share: str, make: Contender) -> nn.Module | None:
    """Return the case's module made of a contender's layers, or None where it has none."""
    if not case.whole:
        params = allowed(dense, share)
        return None if params is None else make(dense, params)
    found = copy.deepcopy(dense)
    able = [n for n, m in found.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    changed = 0
    for name in able if case.name.startswith("BERT") else able[1:-1]:
        layer = found.get_submodule(name)
        if isinstance(layer, nn.Conv2d) and layer.groups > 1:
            continue
        params = allowed(layer, share)
        small = None if params is None else make(layer, params)
        if small is not None:
            found.set_submodule(name, small)
            changed += 1
    return found.eval() if changed else None


def rows(case: Case, share: str, skipped: set[str]) -> Iterator[Measured]:
    """Yield what each contender reaches, at each batch."""
    dense = case.make().eval()
    made: dict[str, nn.Module] = {"dense": dense}
    for who, (package, make) in CONTENDERS.items():
        if package in skipped or (case.whole and who in LAYERS_ONLY):
            continue
        if who == "torch.kron" and share != "one":  # hundreds of weights would be built
            continue
        found = contender(case, dense, share, make)
        if found is not None:
            made[who] = found
    for batch in case.batches:
        x = case.example(batch)
        with torch.inference_mode():
            repeats = 7 if case.whole else 21
            times = interleaved([partial(one, x) for one in made.values()], repeats, 2)
        for (who, model), taken in zip(made.items(), times, strict=True):
            count = sum(p.numel() for p in model.parameters())
            yield Measured(case.name, share, batch, who, count, times[0], times[0] / taken)


def shown(found: list[Measured], facts: tuple[tuple[str, str], ...]) -> Page:
    """Return the page: a table and a picture for each case."""
    sections = []
    for name in dict.fromkeys(one.case for one in found):
        mine = [one for one in found if one.case == name]
        batches = sorted({one.batch for one in mine})
        table: list[Row] = []
        bars: list[tuple[str, float, float]] = []
        for share, who in dict.fromkeys((one.share, one.who) for one in mine):
            of = {one.batch: one for one in mine if (one.share, one.who) == (share, who)}
            first = next(iter(of.values()))
            words = "one term" if share == "one" else f"{float(share):.0%}"
            ratios = [of[batch].ratio for batch in batches]
            told = (f"{ratio:.2f}" for ratio in ratios)
            table.append(Row((words, who, f"{first.params:,}", *told)))
            if who != "dense":
                bars.append((f"{who}, {words}", ratios[0], ratios[-1]))
        heads = ("weights", "layer", "parameters", *(f"batch {batch}" for batch in batches))
        keys = (f"batch {batches[0]}", f"batch {batches[-1]}")
        picture = Bars(
            title="Dense time over its time", label=f"speed of {name}", rows=tuple(bars), keys=keys
        )
        parts = (picture, Table(heads, tuple(table), frozenset(range(2, len(heads)))))
        sections.append(Section(name, parts))
    note = Note("Ratios of medians, of passes that take turns in one process; above 1 is faster.")
    return Page(
        title="Bilinear layers and their peers",
        verdict="Times of layers and of whole models at equal parameters.",
        sections=(Section("", (note,)), *sections),
        facts=facts,
    )


def main() -> None:
    """Print the table, and write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the case's name")
    parser.add_argument("--share", nargs="+", default=["one", "0.25"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    skipped = {name for name in PEERS if importlib.util.find_spec(name) is None}
    for name in sorted(skipped):
        print(f"({PEERS[name]} is not installed: left out; pip install '.[bench]')")
    versions = {PEERS[name]: version(PEERS[name]) for name in PEERS if name not in skipped}
    versions |= {"torch": torch.__version__, "bp-convert": bp_convert.__version__}
    print(f"{machine()}; {versions}\n\n| case | weights | batch | layer | parameters | ratio |")
    print("| --- | --- | ---: | --- | ---: | ---: |", flush=True)
    found: list[Measured] = []
    for case in cases():
        if asked.only not in case.name:
            continue
        for share in asked.share:
            for one in rows(case, share, skipped):
                found.append(one)
                print(
                    f"| {one.case} | {one.share} | {one.batch} | {one.who} | {one.params:,} | "
                    f"{one.ratio:.2f} |",
                    flush=True,
                )
    asked.out.mkdir(parents=True, exist_ok=True)
    facts = (("machine", machine()), ("versions", str(versions)))
    told = {"machine": machine(), "versions": versions, "rows": [asdict(one) for one in found]}
    (asked.out / "peers.json").write_text(json.dumps(told, indent=1) + "\n")
    (asked.out / "peers.html").write_text(html(shown(found, facts)))
    print(f"wrote {asked.out / 'peers.json'} and {asked.out / 'peers.html'}")


if __name__ == "__main__":
    main()
