"""Outputs of blocks beside the teacher's: against a naive error, and when they count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import TrainingError
from bp_convert.feeding.feed import Micro
from bp_convert.training.watched import Counterparts, Watched, blocks_in
from bp_convert.values.training import Distill

IDS = torch.randint(1, 12, (40, 5), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(5) < 1 + torch.arange(40)[:, None] % 5).long()
TEXTS = {"input_ids": IDS, "attention_mask": MASK}
INPUTS = ["input_ids=int64:1x5<12", "attention_mask=int64:1x5<2"]


class Block(nn.Module):
    """A hidden layer beside a path round it; its output comes in a tuple."""

    def __init__(self, width: int = 8, out: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, out)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        made = self.down(self.drop(torch.tanh(self.up(x))))
        return (x + made if made.shape == x.shape else made,)


class Encoder(nn.Module):
    """Tokens through blocks; what comes out are features, or class scores."""

    def __init__(self, outs: tuple[int, ...] = (8, 8), classes: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block(8, out) for out in outs)
        self.head = nn.Linear(outs[-1], classes) if classes else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x: Tensor = self.words(input_ids)
        for block in self.blocks:
            (x,) = block(x)
        return x if self.head is None else self.head(x.mean(1))


def pair(**how: Any) -> tuple[Any, Any]:
    """A source, and the same with other weights in its second block."""
    torch.manual_seed(0)
    source = Encoder(**how).eval()
    other = Encoder(**how).eval()
    other.load_state_dict(source.state_dict())
    with torch.no_grad():
        other.blocks[1].down.weight.mul_(0.5)
    return other, source


def gap_of(student: nn.Module, teacher: nn.Module, mask: Tensor | None) -> Tensor:
    pairs = Counterparts(student, teacher, blocks_in(student, teacher))
    with pairs:
        student(**TEXTS), teacher(**TEXTS)
    found = pairs.gap(mask)
    pairs.remove()
    assert found is not None
    return found


def test_the_error_of_blocks_is_that_of_unmasked_tokens_relative_to_the_source_s() -> None:
    student, source = pair()
    words = source.words(IDS)
    (first,) = source.blocks[0](words)
    theirs, mine = source.blocks[1](first)[0], student.blocks[1](first)[0]

    def naive(chosen: Tensor) -> Tensor:
        gap = (mine[chosen] - theirs[chosen]).square().sum() / theirs[chosen].square().sum()
        return gap / 2  # the first block's is none

    found = gap_of(student, source, MASK.bool())
    torch.testing.assert_close(found, naive(MASK.bool()))
    torch.testing.assert_close(gap_of(student, source, None), naive(torch.ones_like(MASK).bool()))
    found.backward()
    assert float(student.blocks[1].down.weight.grad.abs().max()) > 0


def test_indices_that_a_block_puts_out_first_are_not_what_is_learnt() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.argmax(-1), self.line(x)

    student, teacher = Indexed(), Indexed()
    pairs = Counterparts(nn.ModuleDict({"a": student}), nn.ModuleDict({"a": teacher}), ["a"])
    x = torch.randn(4, 8)
    with pairs:
        (_, mine), (_, theirs) = student(x), teacher(x)
    found = pairs.gap()
    assert found is not None
    torch.testing.assert_close(found, (mine - theirs).square().sum() / theirs.square().sum())


def test_a_source_that_puts_out_nothing_makes_no_error_infinite() -> None:
    student, source = pair()
    with torch.no_grad():
        for one in source.parameters():
            one.zero_()
    assert bool(gap_of(student, source, MASK.bool()).isfinite())
    assert bool(gap_of(student, source, torch.zeros_like(MASK).bool()).isfinite())


@pytest.mark.parametrize(
    ("how", "distill", "counts"),
    [
        ({}, {}, True),
        ({}, {"blocks": 0}, False),
        ({}, {"logits": 0, "layers": 1}, False),
        ({"outs": (8, 6)}, {}, False),  # outputs of two shapes
        ({"outs": (8, 6)}, {"blocks": 2}, True),
        ({"classes": 3}, {}, False),
        ({"classes": 3}, {"blocks": 0.5}, True),
    ],
)
def test_blocks_count_where_they_fit_or_are_asked_for(
    how: dict[str, Any], distill: dict[str, float], counts: bool
) -> None:
    student, source = pair(**how)
    if "layers" in distill:
        student.blocks[0].up = bp_convert.BPLinear.from_dense(student.blocks[0].up, rank=1)
    _, report = bp_convert.finetune(
        student, TEXTS, teacher=source, steps=2, inputs=INPUTS, distill=distill
    )
    (terms,) = (note for note in report.notes if note.startswith("loss: "))
    assert ("blocks' outputs" in terms) == counts
    if counts:
        assert f"{distill.get('blocks', 1):g} x relative squared error of blocks' outputs" in terms


def test_blocks_of_other_classes_are_left_alone_and_none_at_all_named() -> None:
    student, source = pair()
    student.blocks[0] = nn.Sequential(*student.blocks[0].children())
    source.blocks[0] = nn.Sequential(*source.blocks[0].children())
    assert not Watched(student, source, Distill()).sets
    plain = nn.Sequential(nn.Linear(4, 4))
    assert not Watched(plain, plain, Distill()).sets
    with pytest.raises(TrainingError, match=r"distill\.blocks"):
        Watched(plain, plain, Distill(blocks=1))


def test_nothing_that_can_be_compared_is_an_error_where_nothing_else_counts() -> None:
    student, source = pair()
    source.blocks[0].up, source.blocks[0].down = nn.Linear(8, 24), nn.Linear(24, 8)
    student.blocks[0].up = bp_convert.BPLinear.from_dense(student.blocks[0].up, rank=1)
    only = {"labels": 0, "logits": 0, "layers": 1}
    asked: dict[str, Any] = {"teacher": source, "steps": 2, "inputs": INPUTS}
    with pytest.raises(TrainingError, match=r"distill\.layers"):
        bp_convert.finetune(student, TEXTS, distill=only, **asked)
    bp_convert.finetune(student, TEXTS, distill={**only, "logits": 1}, **asked)


@pytest.mark.slow
def test_blocks_alone_are_learnt_and_validated() -> None:
    _, source = pair()
    small, _ = bp_convert.convert(source, rank=2, convert_anyway=True, inputs=INPUTS)
    only = {"labels": 0.0, "logits": 0.0, "blocks": 1.0}
    trained, report = bp_convert.finetune(
        small, TEXTS, teacher=source, distill=only, epochs=30, batch=8, lr=0.01
    )
    mask = MASK.bool()
    assert gap_of(trained, source, mask).item() < 0.7 * gap_of(small, source, mask).item()
    assert report.after["loss"] < report.before["loss"]
    micro = Micro((), TEXTS, None, 40, 1.0)
    assert Watched(trained, source, Distill(blocks=1)).gaps(micro) == {"blocks": None}
