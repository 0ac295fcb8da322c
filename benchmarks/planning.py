"""What planning and converting cost: ResNet-50 and BERT-base, widened and to a target by weights.

Prints seconds of the processor (steadier than those of the clock where others work beside), and how
often the model's own forward ran, on fake tensors and on real ones.

    python benchmarks/planning.py [CASE ...]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from timing import machine
from torch import nn

import bp_convert
from bp_convert import TensorSpec


def resnet50() -> tuple[nn.Module, list[Any]]:
    """Make torchvision's ResNet-50 with random weights, and describe its input."""
    return torchvision.models.resnet50(), [TensorSpec.parse("3x224x224")]


def bert_base() -> tuple[nn.Module, list[Any]]:
    """Make a BERT-base of transformers with random weights, and describe its input."""
    import transformers

    model = transformers.BertModel(transformers.BertConfig())
    return model, [TensorSpec(name="input_ids", dtype="int64", shape=(32,), high=30522)]


REQUESTS: dict[str, dict[str, Any]] = {
    "alpha=2": {"alpha": 2},
    "params=0.25": {"target": "params=0.25"},
}
MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "resnet50": resnet50,
    "bert-base": bert_base,
}
STEPS: dict[str, Callable[..., Any]] = {"plan": bp_convert.plan, "convert": bp_convert.convert}


def main() -> None:
    """Time the named cases, each once."""
    cases = [f"{model} {asked} {step}" for model in MODELS for asked in REQUESTS for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", default=cases, help=f"of {', '.join(cases)}")
    print(f"{machine()}\n{'case':30} {'seconds':>8} {'forwards':>9}")
    for case in parser.parse_args().case:
        name, asked, step = case.split()
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        calls, plain = [0], type(model).forward

        @functools.wraps(plain)
        def counted(*args: Any, plain: Any = plain, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls[0] += 1
            return plain(*args, **kwargs)

        type(model).forward = counted  # type: ignore[method-assign]
        start = time.process_time()
        STEPS[step](model.eval(), inputs=inputs, **REQUESTS[asked])
        taken = time.process_time() - start
        type(model).forward = plain  # type: ignore[method-assign]
        print(f"{case:30} {taken:8.1f} {calls[0]:9}", flush=True)


if __name__ == "__main__":
    main()
