"""The parser of Flickr8k beside its recipe."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from torch import nn

import bp_convert
from bp_convert.models import build
from bp_convert.scripts import run_script
from tests.data.crafted import image
from tests.training.test_feed import read

flickr8k = run_script(Path(__file__).parents[2] / "recipes" / "flickr8k.py", "flickr8k")


@pytest.fixture
def flickr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two images for training and one for development, with a caption or two each."""
    texts = tmp_path / "Flickr8k_text"
    texts.mkdir()
    (texts / "Flickr8k.token.txt").write_text(
        "a.jpg#0\tA dog runs .\nb.jpg#0\tDog !\nb.jpg#1\tThe dog\nc.jpg#0\tA cat\n"
    )
    (texts / "Flickr_8k.trainImages.txt").write_text("a.jpg\nb.jpg\n")
    (texts / "Flickr_8k.devImages.txt").write_text("c.jpg\n")
    np.savez(
        tmp_path / "features.npz",
        names=np.array(["a.jpg", "b.jpg", "c.jpg"]),
        features=np.arange(3, dtype=np.float32)[:, None].repeat(4, 1),
    )
    monkeypatch.setattr(flickr8k, "FOLDER", tmp_path)
    monkeypatch.setattr(flickr8k, "LENGTH", 6)
    return flickr8k


def test_flickr_gives_each_next_word(flickr: ModuleType) -> None:
    found = read(flickr.train, flickr.dev, "4", "int64:1x6", batch=50)
    (micro,) = found.learnt.epoch(0)
    # dog is the most frequent word, after the marks: 0 padding, 1 unknown
    words = ["<pad>", "<unknown>", "<end>", "<start>", "dog", "a", "runs", "the"]
    said = {
        (int(feature), " ".join(words[i] for i in tokens if i), words[label])
        for feature, tokens, label in zip(
            micro.args[0][:, 0],
            micro.args[1].tolist(),
            micro.labels.tolist(),
            strict=True,  # type: ignore[union-attr]
        )
    }
    assert said == {
        (0, "<start>", "a"), (0, "<start> a", "dog"), (0, "<start> a dog", "runs"),
        (0, "<start> a dog runs", "<end>"), (1, "<start>", "dog"), (1, "<start> dog", "<end>"),
        (1, "<start>", "the"), (1, "<start> the", "dog"), (1, "<start> the dog", "<end>"),
    }  # fmt: skip
    assert micro.args[1][:, -1].min() > 0  # padded in front: the last step is read
    assert found.held is not None
    (held,) = found.held.epoch(0)
    assert len(held.args[0]) == 3
    assert 1 in held.args[1].unique()  # cat, which no training caption has


def test_the_captioner_learns_from_flickr(flickr: ModuleType) -> None:
    model = build("captioner", vocabulary=16, features=4)
    _, report = bp_convert.finetune(
        model, flickr.train, preset="paper-captioner", epochs=3, validation=0.2,
        inputs=["4", "int64:1x6<16"],
    )  # fmt: skip
    assert report.curve[-1][1] < report.curve[0][1]


def test_features_are_computed_from_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Vgg(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(3, 2, 1)
            self.avgpool = nn.AdaptiveAvgPool2d(2)
            self.classifier = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))

    image(tmp_path / "Flicker8k_Dataset" / "x.jpg", (1, 2, 3))
    monkeypatch.setattr(flickr8k, "FOLDER", tmp_path)
    with np.load(flickr8k.compute_features(Vgg())) as found:
        assert found["features"].shape == (1, 5)
        assert found["names"].tolist() == ["x.jpg"]
