"""Layers that are quantised, scripted or shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.kinds.foreign import taken_over


class Params4bit(nn.Parameter):
    """Named as the one of bitsandbytes."""


class DTensor(nn.Parameter):
    """Named as the one of torch."""


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Params4bit, "bitsandbytes: load it without"), (DTensor, "gather the whole weights first")],
)
def test_tensors_of_others_are_told_by_structure(kind: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 4))
    model[0].weight = kind(torch.randn(12, 12))
    found = bp_convert.plan(model, inputs=["12"]).layer("0")
    assert found is not None
    assert found.action == "kept"
    assert words in found.reason


def test_classes_of_others_are_told_by_their_home() -> None:
    home: Any = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    assert taken_over(home(2, 2)).startswith("quantised by bitsandbytes")
    shard: Any = type("FullyShardedDataParallel", (nn.Module,), {})
    shard.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    assert "shard of FSDP" in taken_over(shard())
    assert taken_over(nn.Linear(2, 2)) == ""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_layers_are_named_with_what_to_do() -> None:
    quantised: Any = torch.ao.nn.quantized.dynamic.Linear(12, 12)
    model = nn.Sequential(nn.Linear(12, 12), quantised, nn.Linear(12, 4))
    plan = bp_convert.plan(model, inputs=["12"])
    (note,) = [one for one in plan.notes if "such as 1" in one]
    assert "quantised: convert the model first, and quantise the result" in note


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_scripted_model_is_refused_and_a_scripted_part_stays() -> None:
    scripted = torch.jit.script(nn.Linear(12, 12))
    with pytest.raises(PlanError, match=r"TorchScript program(.|\n)*script the result"):
        bp_convert.plan(scripted, inputs=["12"])
    plan = bp_convert.plan(nn.Sequential(scripted, nn.Linear(12, 4)), inputs=["12"])
    (other,) = plan.others
    assert "give the model that it was made from" in other.reason
