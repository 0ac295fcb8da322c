"""What ``inspect`` shows of a file that holds weights and no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from bp_convert.cli.session import DONE

if TYPE_CHECKING:
    from torch import Tensor

    from bp_convert.files import Loaded


def opened_or_shown(
    model: Path,
    arch: str | None,
    trust: list[str] | None,
    allow_missing: bool,
    *,
    json_only: bool,
) -> Loaded:
    """Open a model file; of one that holds weights only, show these, and end.

    Raises:
        CheckpointError: the file is neither.
    """
    from bp_convert import pipeline
    from bp_convert.files import NeedsArchError, weights_in

    try:
        return pipeline.open_model(model, arch=arch, trust=trust or (), allow_missing=allow_missing)
    except NeedsArchError as problem:
        weights = weights_in(model)
        if json_only:
            print(json.dumps({name: _form(one) for name, one in weights.items()}, indent=1))
        else:
            for line in _lines(model, weights, problem.fix):
                print(line)
    raise SystemExit(DONE)


def _form(one: Tensor) -> dict[str, object]:
    return {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch.")}


def _lines(model: Path, weights: dict[str, Tensor], fix: str) -> list[str]:
    numbers = sum(one.numel() for one in weights.values())
    width = max(map(len, weights), default=0)
    return [
        f"{model}: {len(weights)} weights of {numbers:,} numbers, without the model they belong to",
        *(
            f"  {name:<{width}}  {'x'.join(map(str, one.shape)) or 'one'} "
            f"{str(one.dtype).removeprefix('torch.')}"
            for name, one in weights.items()
        ),
        f"To see what would become of each layer, {fix}",
    ]
