"""Dropout while training: in force or left out, and always there afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

import bp_convert
from bp_convert.training.dropout import leave_out, put_back
from tests.training import runs


def test_every_probability_is_left_out_and_comes_back() -> None:
    model = nn.ModuleDict(
        {
            "layer": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3),
            "plane": nn.Dropout2d(0.2),
            "lstm": nn.LSTM(4, 4, 2, dropout=0.1),
            "none": nn.Dropout(0.0),
            "depth": StochasticDepth(0.2, "row"),
            "linear": nn.Linear(2, 2),
        }
    ).train()
    model["none"].attention_dropout, model["none"].p_other = 0.4, 0.5
    model["linear"].p = 0.5  # of something else
    before = [dict(vars(one)) for one in model.modules()]
    changed = leave_out(model)
    assert len(changed) == 8  # three modules and the attention in the layer; the rest, one each
    for _, name, value in changed:
        assert value > 0, name
    x = torch.randn(3, 5, 8)
    assert torch.equal(model["layer"](x), model["layer"](x))
    assert model["lstm"].dropout == model["none"].attention_dropout == 0
    assert (model["none"].p_other, model["linear"].p, model["depth"].p) == (0.5, 0.5, 0)
    put_back(changed)
    assert [dict(vars(one)) for one in model.modules()] == before
    assert not torch.equal(model["layer"](x), model["layer"](x))


@pytest.mark.parametrize(
    ("labelled", "asked", "left_out"),
    [
        (False, {}, True),
        (True, {}, False),
        (True, {"distill": {"labels": 0}}, True),
        (True, {"dropout": False}, True),
        (False, {"dropout": True}, False),
    ],
)
def test_it_is_left_out_where_the_teacher_alone_is_learnt(
    labelled: bool, asked: dict[str, Any], left_out: bool
) -> None:
    torch.manual_seed(0)
    source = runs.Digest()
    data = runs.data() if labelled else runs.data()[0]
    still = copy.deepcopy(source)
    still.body[3].p = 0.0
    how = {"teacher": source, "steps": 3, "lr": 1e-2, **asked}
    curves = [bp_convert.finetune(one, data, **how)[1].curve for one in (source, still)]
    assert (curves[0] == curves[1]) == left_out
    assert bp_convert.finetune(source, data, **how)[0].body[3].p == 0.2
