"""How much faster bilinear layers and converted models are than dense ones.

    python benchmarks/timing.py layers [--only Linear] [--rank 1 4] [--way factored] [--train]
    python benchmarks/timing.py models [--only MODEL] [--share 0.25]
    python benchmarks/timing.py nearest    # the fit itself, against a full SVD
    python benchmarks/timing.py planning [--only "resnet50 alpha=2 plan"]
    python benchmarks/timing.py fitting

Medians of passes that take turns in one run; above 1 the bilinear one is faster. Layers have the
factors of the ``fast`` policy and run as a plan would have them (``--way``); models are planned by
their weights alone. What planning and converting cost themselves is told in seconds, in seconds of
the processor, which are steadier where others work beside, and in runs of the model's own forward,
on fake tensors and on real ones; nothing is read from the cache. ``benchmarks/recurrent.py`` times
the paths of LSTMs.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import interleaved, machine
from benchmarks.targets import MODELS
from bp_convert.costs import measure
from bp_convert.kinds import Ask, kind_of, predict
from bp_convert.kron.nearest import nearest_kronecker_sum, rearrange
from bp_convert.search.selection import SLOWER
from bp_convert.values.literals import Ways

LINEAR = ((512, 512), (768, 3072), (4096, 4096), (25088, 4096))
CONV = ((64, 56), (128, 28), (256, 14), (512, 7))
LSTM = ((256, 256, 20), (256, 1000, 20))
SIDE, PAIR, RANK = 4096, (64, 64), 8  # of the weights of ``nearest``


def cases(large: bool) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
    """Yield layers as models have them, each with a small and a large batch.

    Args:
        large: take the large batches of a CUDA device.
    """
    for inputs, outputs in LINEAR:
        xs = [torch.randn(n, inputs) for n in ((32, 4096) if large else (1, 32))]
        yield f"Linear {inputs} -> {outputs}", nn.Linear(inputs, outputs), xs
    for channels, size in CONV:
        xs = [torch.randn(n, channels, size, size) for n in ((16, 64) if large else (1, 16))]
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        yield f"Conv2d {channels} 3x3 at {size}x{size}", conv, xs
    for inputs, hidden, steps in LSTM:
        xs = [torch.randn(steps, n, inputs) for n in (1, 32)]
        yield f"LSTM {inputs} -> {hidden}, {steps} steps", nn.LSTM(inputs, hidden), xs
    tokens = [torch.randint(0, 30522, (n, 128)) for n in (1, 32)]
    yield "Embedding 30522 x 384, 128 words", nn.Embedding(30522, 384), tokens


def layers(asked: argparse.Namespace) -> None:
    """Print a row for each layer, rank and batch."""
    dtype = getattr(torch, asked.dtype)
    print(f"{machine(asked.device)}, {asked.dtype}, {'training' if asked.train else 'inference'}")
    print(f"{'layer':34s} {'batch':>5s} {'rank':>4s} {'dense us':>9s} {'ratio':>7s}  factors")
    for name, dense, xs in cases(asked.device.startswith("cuda")):
        if asked.only not in name:
            continue
        dense = dense.to(asked.device, dtype).train(asked.train)
        kind = kind_of(dense)
        assert kind is not None
        widths = kind.widths(dense)
        for rank in asked.rank:
            factors = kind.factor(dense, widths, Ask(rank=rank))
            twin = kind.build(dense, widths, factors, asked.device).train(asked.train)
            speed = predict(kind, dense, widths, factors, [tuple(xs[0].shape)])
            twin.way = "factored" if speed is None else speed.way(asked.way)  # type: ignore
            for x in xs:
                x = x.to(asked.device, dtype if x.is_floating_point() else None)
                slow, fast = interleaved([_pass(dense, x), _pass(twin, x)], 21, device=asked.device)
                batch = x.shape[1] if isinstance(dense, nn.LSTM) else len(x)
                print(
                    f"{name:34s} {batch:5d} {rank:4d} {slow:9.0f} {slow / fast:6.2f}x  "
                    f"{twin.way}  {next(iter(factors.values()))}",
                    flush=True,
                )


def _pass(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    def infer() -> None:
        with torch.inference_mode():
            layer(x)

    def step() -> None:
        layer.zero_grad()
        given = x.detach().requires_grad_() if x.is_floating_point() else x
        out = layer(given)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    return step if layer.training else infer


def models(asked: argparse.Namespace) -> None:
    """Print milliseconds of whole models before and after, and their ratio."""
    print(f"{machine()}\n\n| model | parameters | batch | before, ms | after, ms | ratio | note |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    for name, (make, inputs) in MODELS.items():
        if asked.only not in name:
            continue
        model = make()
        for share in asked.share:
            plan = bp_convert.plan(model, target=f"params={share}", inputs=inputs)
            small = bp_convert.apply(model, plan)
            note = "planned as slower" if SLOWER in plan.notes else ""
            for batch in (1, 32):
                found = measure(model, small, plan.inputs, batch=batch)
                print(
                    f"| {name} | {100 * plan.params.ratio:.1f} % | {batch} | "
                    f"{found.dense_ms:.2f} | {found.converted_ms:.2f} | "
                    f"{found.speedup:.2f} | {note} |",
                    flush=True,
                )


def nearest(asked: argparse.Namespace) -> None:
    """Print how long the nearest Kronecker sum of a 4096 x 4096 weight takes, how long a full SVD
    of the rearranged matrix, and the error beside the optimum, which the singular values give."""
    print(f"nearest Kronecker sum, {SIDE}x{SIDE}, pairs 64x64, R={RANK}; {machine()}")
    # Columns scaled by 1 / i fall; a Gaussian weight has nothing to find, and is the hardest.
    falling = torch.randn(SIDE, SIDE) / torch.arange(1, SIDE + 1)
    falling = falling.view(*PAIR, *PAIR).transpose(1, 2).reshape(SIDE, SIDE)
    for name, weight in (("falling", falling), ("flat", torch.randn(SIDE, SIDE))):
        table = rearrange(weight, PAIR, PAIR)
        ours: list[float] = []
        nearest_kronecker_sum(weight, PAIR, PAIR, RANK)  # warm up
        for _ in range(5):
            start = time.perf_counter()
            fit = nearest_kronecker_sum(weight, PAIR, PAIR, RANK)
            ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        values = torch.linalg.svd(table, full_matrices=False).S.double()
        slow, fast = time.perf_counter() - start, median(ours)
        best = float((values[RANK:].square().sum() / values.square().sum()).sqrt())
        print(
            f"{name:8s} ours {fast:6.3f} s  svd {slow:7.2f} s  ratio {slow / fast:6.1f}"
            f"  error {fit.error:.6f}  optimum {best:.6f}  over {fit.error / best - 1:+.5%}",
            flush=True,
        )


def bert() -> nn.Module:
    """Return BERT-base with random weights."""
    import transformers

    model: nn.Module = transformers.BertModel(transformers.BertConfig())
    return model


PLANNED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet50": (torchvision.models.resnet50, "3x224x224"),
    "bert-base": (bert, "input_ids=int64:1x32<30522"),
    "vit-l": (torchvision.models.vit_l_16, "3x224x224"),
}
REQUESTS: dict[str, Any] = {"alpha=2": {"alpha": 2}, "params=0.25": {"target": "params=0.25"}}
STEPS: dict[str, Callable[..., Any]] = {"plan": bp_convert.plan, "convert": bp_convert.convert}


def planning(asked: argparse.Namespace) -> None:
    """Print what planning and converting a model with random weights cost, each once."""
    print(f"{machine()}\n{'case':30} {'seconds':>8} {'processor':>9} {'forwards':>9}")
    for name, words, step in product(PLANNED, REQUESTS, STEPS):
        case = f"{name} {words} {step}"
        if asked.only not in case:
            continue
        torch.manual_seed(0)
        make, text = PLANNED[name]
        model = make()
        calls, plain = [0], type(model).forward

        @functools.wraps(plain)
        def counted(*args: Any, plain: Any = plain, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls[0] += 1
            return plain(*args, **kwargs)

        type(model).forward = counted  # type: ignore[method-assign]
        os.environ["BP_CONVERT_CACHE"] = tempfile.mkdtemp()
        start, clock = time.process_time(), time.perf_counter()
        STEPS[step](model.eval(), inputs=[text], **REQUESTS[words])
        taken, passed = time.process_time() - start, time.perf_counter() - clock
        type(model).forward = plain  # type: ignore[method-assign]
        print(f"{case:30} {passed:8.1f} {taken:9.1f} {calls[0]:9}", flush=True)


def fitting(asked: argparse.Namespace) -> None:
    """Print what planning MiniLM to a half by 512 examples and fitting it takes."""
    from benchmarks.quality import sentences  # its model and its texts come from registries

    task = sentences(512)
    os.environ["BP_CONVERT_CACHE"] = tempfile.mkdtemp()
    one_way: dict[str, Any] = {"sides": "inputs", "allocation": "measured", "shrink": 0.0}
    data: dict[str, Any] = {"calibrate": task.calibration}
    start = time.perf_counter()
    plan = bp_convert.plan(
        task.model, target="params=0.5", reconstruct="off", groups=False, **one_way, **data
    )
    planned = time.perf_counter()
    small = bp_convert.apply(task.model, plan, **data)
    fitted = time.perf_counter()
    score = ", ".join(f"{name} {one:.4f}" for name, one in task.score(small.eval()).items())
    print(f"{machine()}; planned {planned - start:.1f} s, fitted {fitted - planned:.1f} s; {score}")


CASES = {
    **{"layers": layers, "models": models, "nearest": nearest},
    **{"planning": planning, "fitting": fitting},
}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--only", default="", help="a part of the case's name")
    parser.add_argument("--rank", type=int, nargs="+", default=[1, 4], help="of layers")
    parser.add_argument(
        *("--way", "--ways"),
        default="auto",
        choices=get_args(Ways),
        help="of layers: how they run; auto as a plan for one example would say",
    )
    parser.add_argument("--train", action="store_true", help="layers: forward and backward")
    parser.add_argument("--device", default="cpu", help="of layers: cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="of layers")
    parser.add_argument("--share", type=float, nargs="+", default=[0.25], help="of models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    CASES[asked.case](asked)


if __name__ == "__main__":
    main()
