"""What a run reads: sources of every kind, kept apart, augmented, not copied, not downloaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import datasets as vision

import bp_convert
from bp_convert.data import Uses, split_for, vision_sets
from bp_convert.errors import DataError, TrainingError
from bp_convert.feeding.augment import augmented, paper
from bp_convert.feeding.feed import Micro, Place, RowsFeed, feeds, groups
from bp_convert.storage import plan_of
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Training
from tests.data.crafted import fashion, image, refuses, tokenizer
from tests.training import runs


@dataclass
class Material:
    """What a run reads."""

    learnt: Any
    held: Any
    words: str
    notes: tuple[str, ...]


def read(data: Any, validation: Any = 0.1, *specs: str, **asked: Any) -> Material:
    inputs = tuple(map(TensorSpec.parse, specs))
    place = asked.pop("place", Place())
    parts = {key: asked.pop(key, ()) for key in ("fitted", "left_out")}
    opening = {key: asked.pop(key) for key in ("tokenizer", "download") if key in asked}
    settings = Training(**asked)
    uses = Uses(learn=data, validation=validation, order=settings.seed, **parts)
    split = split_for(nn.Identity(), uses, Settings(inputs=inputs), **opening)
    return Material(*feeds(split, settings, place), split.notes)


def first(micro: Micro) -> Tensor:
    value: Tensor = micro.args[0] if micro.args else next(iter(micro.kwargs.values()))
    return value


def names(feed: Any, epoch: int = 0, start: int = 0) -> list[int]:
    """Return the first number of each example, which the tests use as its name."""
    return [int(v) for one in feed.epoch(epoch, start) for v in first(one).flatten(1)[:, 0]]


def numbered(count: int) -> tuple[Tensor, Tensor]:
    return torch.arange(float(count))[:, None].repeat(1, 3), torch.arange(count) % 2


def test_what_is_held_out_is_never_learnt() -> None:
    found = read(numbered(50), 0.2, seed=3)
    learnt, held = names(found.learnt), names(found.held)
    assert len(held) == 10
    assert sorted(learnt + held) == list(range(50))
    assert names(read(numbered(50), 0.2, seed=4).held) != held
    assert "40 examples" in found.words
    with refuses("of which 1 would be held out"):
        read(numbered(1))


def test_what_is_scored_is_left_alone_and_what_was_fitted_is_held_out_last() -> None:
    def parts(fitted: range, scored: range, share: float = 0.2) -> tuple[set[int], set[int], str]:
        found = read(numbered(50), share, fitted=fitted, left_out=scored)
        return set(names(found.learnt)), set(names(found.held)), " ".join(found.notes)

    learnt, held, notes = parts(range(30), range(40, 50))
    assert len(held) == 8
    assert held <= set(range(30, 40))
    assert learnt == set(range(40)) - held
    assert not notes
    learnt, held, notes = parts(range(48), range(0))
    assert held > {48, 49}
    assert "8 of 10 validation examples were calibrated on" in notes
    with refuses("10 examples, of which 10 would be held out"):
        parts(range(0), range(40), 1.0)


def test_each_epoch_has_its_order_and_any_place_in_it_can_be_started_at() -> None:
    feed = read(numbered(40), 0, batch=6).learnt
    one, two = names(feed, 0), names(feed, 1)
    assert sorted(one) == sorted(two) == list(range(40))
    assert one != two
    assert one == names(feed, 0)
    assert names(feed, 0, 4) == one[24:]


def test_processes_share_each_batch() -> None:
    whole = read(numbered(25), 0, batch=10).learnt
    parts = [read(numbered(25), 0, batch=10, place=Place(rank, 3)).learnt for rank in range(3)]
    for one, *mine in zip(whole.epoch(0), *(part.epoch(0) for part in parts), strict=True):
        assert torch.equal(first(one), torch.cat([first(part) for part in mine]))
        means = sum(first(part).mean() * part.share for part in mine) / 3
        assert float(means) == pytest.approx(float(first(one).mean()))
    few = [next(iter(read(numbered(2), 0, place=Place(r, 3)).learnt.epoch(0))) for r in range(3)]
    assert [one.share for one in few] == [1, 1, 1]
    assert all(len(first(one)) == 2 for one in few)


@pytest.mark.parametrize(("count", "sizes"), [(6, [2, 2, 2]), (5, [2, 2, 1]), (1, [1]), (0, [])])
def test_passes_are_put_together_into_steps(count: int, sizes: list[int]) -> None:
    made = list(groups(iter([Micro((), {}, None, 1, 1.0)] * count), 2))
    assert [len(group) for group, _ in made] == sizes
    assert [last for _, last in made] == [i == len(sizes) - 1 for i in range(len(sizes))]


class Counted(Dataset[Any]):
    """A data set that cannot be sent to another process."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(row)) + torch.rand(3) * 0.5, row % 2

    def __reduce__(self) -> Any:
        raise RuntimeError("it is copied")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
def test_workers_share_the_data_and_change_nothing() -> None:
    alone, shared = (read(Counted(), 0, "3", batch=8, workers=n).learnt for n in (0, 2))
    for one, two in zip(alone.epoch(0), shared.epoch(0), strict=True):
        assert torch.equal(first(one), first(two))  # what the user's code draws included
        assert one.labels is not None
        assert torch.equal(one.labels, two.labels)  # type: ignore[arg-type]


def test_faults_in_workers_come_out_as_they_are() -> None:
    bad = torch.full((20, 3), float("nan"))
    with refuses("NaN"):
        names(read(bad, 0, "3", workers=1).learnt)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loader", "factory", "iterable"])
def test_streams_are_learnt_and_resumed(kind: str, tmp_path: Path) -> None:
    set_ = TensorDataset(*runs.data())

    def loader() -> DataLoader[Any]:
        return DataLoader(set_, batch_size=20, shuffle=True)

    data: Any = {"loader": loader(), "factory": loader, "iterable": list(loader())}[kind]
    if kind == "iterable":
        data = _Again(data)
    length = {"steps": 25} if kind == "iterable" else {"epochs": 2.5}
    more: dict[str, Any] = {"lr": 0.01, "batch": 10, "checkpoint_every": 4, **length}
    whole, report = _run(data, more, None)
    if kind != "iterable":
        assert report.steps == 50
    assert any("cannot be split" in note for note in report.notes)

    class Stop(Exception):  # noqa: N818
        pass

    def stop(words: str, done: int, total: int) -> None:
        if done == 22:
            raise Stop

    with pytest.raises(Stop):
        _run(data, more, tmp_path, progress=stop)
    again, resumed = _run(data, more, tmp_path, resume=True)
    assert resumed.resumed_from == 20
    assert resumed.curve == report.curve
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in whole.state_dict().items())


class _Again:
    """Yields batches each time that it is asked; its length is not known."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _run(data: Any, more: dict[str, Any], folder: Path | None, **rest: Any) -> Any:
    torch.manual_seed(0)
    return bp_convert.finetune(runs.Digest(), data, inputs=["16"], folder=folder, **more, **rest)


def test_a_stream_without_a_length_wants_steps() -> None:
    with pytest.raises(TrainingError, match="give steps=N"):
        read(_Again([runs.data()]), 0, "16")


def test_data_of_another_shape_than_was_guessed_is_learnt_where_the_model_runs_on_it() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    images, labels = torch.randn(12, 3, 10, 9), torch.arange(12) % 2
    more: dict[str, Any] = {"steps": 2, "batch": 4}
    for data in ((images, labels), DataLoader(TensorDataset(images, labels), batch_size=4)):
        assert bp_convert.finetune(model, data, **more)[1].steps == 2
    with refuses("examples of shape 2x10x9"):
        bp_convert.finetune(model, (images[:, :2], labels), **more)


def test_words_that_calibration_has_not_seen_are_learnt_up_to_the_table_s_end() -> None:
    source = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    seen = torch.arange(60).reshape(20, 3) % 20
    small, _ = bp_convert.convert(source, rank=2, convert_anyway=True, calibrate=seen)
    assert plan_of(small).inputs[0].high == 20
    others = torch.arange(200).reshape(40, 5) % 50  # more of them, longer, with other words
    assert bp_convert.finetune(small, others, teacher=source, steps=2)[1].steps == 2
    with refuses("allowed: 0 to 49"):
        bp_convert.finetune(small, others + 1, teacher=source, steps=2)


def test_validation_on_what_is_learnt_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 3), "float32"))
    with refuses("learnt from"):
        read(tmp_path / "d.npz", str(tmp_path / "d.npz"), "3")
    data = numbered(9)
    with refuses("learnt from"):
        read(data, data)


def test_torchvision_sets_are_normalised_as_published_and_keep_their_parts(tmp_path: Path) -> None:
    fashion(tmp_path, train=[0, 51, 102, 255], test=[204])
    source = f"FashionMNIST?root={tmp_path}"
    found = read(source, source, "1x28x28", batch=4)
    values = sorted(first(next(iter(found.learnt.epoch(0))))[:, 0, 0, 0].tolist())
    mean, std = vision_sets.NORMS["FashionMNIST"]
    assert values == pytest.approx([(v - mean[0]) / std[0] for v in (0, 0.2, 0.4, 1)])
    assert found.held is not None
    micro = next(iter(found.held.epoch(0)))
    assert float(first(micro)[0, 0, 0, 0]) == pytest.approx((0.8 - mean[0]) / std[0])
    assert micro.labels is not None
    assert micro.labels.tolist() == [4]


def test_nothing_is_downloaded_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def fetch(self: Any) -> None:
        asked.append(True)
        fashion(tmp_path, train=[1, 2], test=[3])

    monkeypatch.setattr(vision.MNIST, "download", fetch)
    source = f"FashionMNIST?root={tmp_path}"
    with refuses("nothing is downloaded"):
        read(source, 0, "1x28x28")
    assert not asked
    assert read(source, 0, "1x28x28", download=True).words.startswith("2 examples")
    assert asked


def test_a_folder_laid_out_as_imagenet_keeps_its_parts(tmp_path: Path) -> None:
    for part, greys in (("train", (10, 20)), ("val", (30, 40))):
        for label, grey in zip("ab", greys, strict=True):
            image(tmp_path / part / label / "0.png", grey)
    source = f"{tmp_path}?mean=0&std=1"
    found = read(source, source, "1x8x8", batch=2)
    seen = [sorted((255 * first(m)[:, 0, 0, 0]).round().tolist())
            for feed in (found.learnt, found.held) for m in feed.epoch(0)]  # fmt: skip
    assert seen == [[10, 20], [30, 40]]


def test_sets_of_datasets_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    arrays = {"x": [[float(i)] * 3 for i in range(10)], "label": [i % 2 for i in range(10)]}
    datasets.Dataset.from_dict(arrays).save_to_disk(tmp_path / "arrays")
    found = read(tmp_path / "arrays", 0.2, "3")
    assert sorted(names(found.learnt) + names(found.held)) == list(range(10))
    pictures = datasets.Dataset.from_dict(
        {"image": [Image.new("L", (8, 8), 10 * i) for i in range(4)], "label": [0, 1, 0, 1]},
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
        ),
    )
    datasets.DatasetDict({"train": pictures, "test": pictures.select([3])}).save_to_disk(
        tmp_path / "pictures"
    )
    source = f"{tmp_path / 'pictures'}?mean=0&std=1"
    found = read(source, source, "1x8x8", batch=4)
    (micro,) = found.learnt.epoch(0)
    greys = (255 * first(micro)[:, 0, 0, 0]).round().tolist()
    assert micro.labels is not None
    assert sorted(zip(greys, micro.labels.tolist(), strict=True)) == [
        (0, 0), (10, 1), (20, 0), (30, 1),
    ]  # fmt: skip
    assert found.held is not None
    assert [len(first(one)) for one in found.held.epoch(0)] == [1]
    datasets.Dataset.from_dict({"text": ["a b", "b b b"], "label": [0, 1]}).save_to_disk(
        tmp_path / "text"
    )
    folder = tokenizer(tmp_path / "tok", ["a", "b"])
    (micro,) = read(tmp_path / "text", 0, "input_ids=int64:1x4", tokenizer=folder).learnt.epoch(0)
    assert sorted(map(tuple, micro.kwargs["input_ids"].tolist())) == [(2, 3, 0), (3, 3, 3)]


def keys(count: int, epoch: int = 0) -> Sequence[tuple[int, int, int]]:
    return [(0, epoch, row) for row in range(count)]


def test_augmentation_moves_turns_and_recolours_by_its_key_alone() -> None:
    images = torch.rand(6, 3, 16, 16)
    one = augmented(images, keys(6))
    assert torch.equal(one, augmented(images, keys(6)))
    assert torch.equal(one[2:3], augmented(images[2:3], [(0, 0, 2)]))
    assert not torch.equal(one, augmented(images, keys(6, epoch=1)))
    assert one.shape == images.shape
    flat = torch.ones(400, 3, 8, 8) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    centres = augmented(flat, keys(400))[:, :, 4, 4].round()
    orders = {tuple(one) for one in centres.int().tolist()}
    assert len(orders) == 6  # every order of the channels
    same = float((centres == torch.tensor([1.0, 2.0, 3.0])).all(1).float().mean())
    assert same == pytest.approx(0.5 + 0.5 / 6, abs=0.1)


def test_augmentation_flips_half_and_shifts_by_whole_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bp_convert.feeding.augment.DEGREES", 0.0)
    ramp = torch.arange(1.0, 17.0).repeat(300, 1, 16, 1)
    found = augmented(ramp, keys(300))[:, 0, 8]
    rising = found[:, 9] > found[:, 6]
    assert float(rising.float().mean()) == pytest.approx(0.5, abs=0.1)
    assert torch.allclose(found, found.round(), atol=1e-3)
    left = {int(row[8].round()) for row in found[rising]}
    assert left == {7, 8, 9, 10, 11}  # 9 without a shift, and up to 2 pixels either way


def test_augmentation_is_for_learning_from_images_alone(tmp_path: Path) -> None:
    fashion(tmp_path, train=list(range(0, 200, 20)), test=[7])
    source = f"FashionMNIST?root={tmp_path}"
    plain, changed = (read(source, source, "1x28x28", augment=one) for one in ("none", "paper"))
    pairs = [
        (next(iter(a.epoch(0))), next(iter(b.epoch(0))))
        for a, b in ((plain.learnt, changed.learnt), (plain.held, changed.held))  # type: ignore[union-attr]
    ]
    assert not torch.equal(first(pairs[0][0]), first(pairs[0][1]))
    assert torch.equal(first(pairs[1][0]), first(pairs[1][1]))
    with pytest.raises(DataError, match="these are no images"):
        paper(((torch.rand(2, 3),), {}), keys(2))
    with refuses("a loader"):
        read(DataLoader(Counted()), 0, "3", augment="paper")
    assert isinstance(plain.learnt, RowsFeed)
