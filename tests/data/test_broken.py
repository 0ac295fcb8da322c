"""Broken images: all are named in one error, or left out by all that read the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.data import Examples, Uses, image_folder, images, split_for
from bp_convert.data.factory import open_data
from bp_convert.errors import DataError
from bp_convert.values.settings import Settings
from tests.data.crafted import first_column, image, load_examples, refuses, scored, spec
from tests.training.test_feed import read

SPECS = [spec("1x8x8")]


def _folder(home: Path, count: int, broken: set[int]) -> Path:
    """Write images of which each is of one grey, its number; some are cut off."""
    for i in range(count):
        path = image(home / f"{i % 2}" / f"{i:03}.png", i)
        if i in broken:
            path.write_bytes(path.read_bytes()[: (i % 2) * 40])  # empty, or cut
    return home


def _greys(found: Examples) -> set[int]:
    return {round(255 * value) for value in first_column(found)}


def test_all_broken_images_are_named_at_once(tmp_path: Path) -> None:
    source = _folder(tmp_path / "images", 40, {3, 8, 21})
    with refuses("3 of 40 images", "0/008.png", "1/003.png", "1/021.png", "?broken=skip"):
        load_examples(source, SPECS)
    with refuses("mean=0&broken=skip"):
        load_examples(f"{source}?mean=0", SPECS)


def test_of_many_broken_images_eight_are_named(tmp_path: Path) -> None:
    source = _folder(tmp_path / "images", 30, set(range(5, 25)))
    with pytest.raises(DataError, match="20 of 30 images") as caught:
        load_examples(source, SPECS)
    assert caught.value.found.partition(" (such as")[0].count(".png") == 8
    assert "and 12 more" in caught.value.found


def test_what_time_does_not_allow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "PATIENCE", -1)
    source = _folder(tmp_path / "images", 10, {3, 8})
    with refuses("at least 1 of 10 images"):
        load_examples(source, SPECS)


def test_a_broken_first_image_is_one_of_all(tmp_path: Path) -> None:
    source = _folder(tmp_path / "images", 10, {0, 5})
    with refuses("2 of 10 images", "0/000.png", "1/005.png"):
        load_examples(source, SPECS)


def test_skipped_ones_are_left_out_and_said(tmp_path: Path) -> None:
    broken = {0, 3, 8, 21}
    source = _folder(tmp_path / "images", 40, broken)
    found = load_examples(f"{source}?broken=skip", SPECS)
    assert _greys(found) == set(range(40)) - broken
    assert found.count == 36
    words = f"36 of 40 examples of {source}?broken=skip, 4 broken images left out (512 asked for)"
    assert found.source == words
    assert found.labels is not None
    greys = [round(255 * value) for value in first_column(found)]
    assert found.labels.tolist() == [grey % 2 for grey in greys]
    whole = _folder(tmp_path / "whole", 4, set())
    assert "broken images" not in load_examples(f"{whole}?broken=skip", SPECS).source


def test_parts_share_no_image_where_some_are_left_out(tmp_path: Path) -> None:
    broken = {1, 2, 5, 11, 17}
    source = f"{_folder(tmp_path / 'images', 30, broken)}?broken=skip"
    fitted = load_examples(source, SPECS, count=10)
    assert fitted.count == 10
    rest = scored(source, SPECS, taken=10)
    assert _greys(fitted) & _greys(rest) == set()
    assert _greys(fitted) | _greys(rest) == set(range(30)) - broken
    # Their numbers are those of the whole folder, so that training tells them apart.
    assert fitted.rows is not None
    args, _, _ = open_data(source.partition("?")[0], SPECS).__getitems__(fitted.rows)
    assert torch.equal(args[0], torch.cat([args[0] for args, _ in fitted.batches]))


def test_training_learns_and_validates_on_whole_images_only(tmp_path: Path) -> None:
    broken = {0, 7, 13}
    source = f"{_folder(tmp_path / 'images', 30, broken)}?broken=skip"
    found = read(source, 0.2, "1x8x8", batch=4)
    assert (found.learnt.count, found.held.count) == (22, 5)
    assert "3 broken images left out" in found.notes
    other = f"{_folder(tmp_path / 'other', 10, {2})}?broken=skip"
    beside = read(source, other, "1x8x8", batch=4)
    assert (beside.learnt.count, beside.held.count) == (27, 9)


def test_a_folder_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"{_folder(tmp_path / 'images', 12, {3})}?broken=skip"
    calls: list[Any] = []
    decoded = image_folder._decoded
    monkeypatch.setattr(image_folder, "_decoded", lambda path: calls.append(path) or decoded(path))
    uses = Uses(source, 2, evaluate=source, scored=2, learn=source, validation=0.2)
    split = split_for(nn.Identity(), uses, Settings(inputs=tuple(SPECS)))
    assert len(calls) == 12 + 1
    for share in (split.calibrate, split.evaluate):
        assert share is not None
        assert share.examples.count == 2
    assert len(calls) == 12 + 1 + 2 + 2
    image(tmp_path / "images" / "1" / "003.png", 9)  # mended
    assert load_examples(source, SPECS).count == 12


def test_a_folder_of_broken_images_alone(tmp_path: Path) -> None:
    source = _folder(tmp_path / "images", 4, set(range(4)))
    with refuses("4 of 4 images", "there is no other image"):
        load_examples(f"{source}?broken=skip", SPECS)


def test_other_words_than_skip_are_refused(tmp_path: Path) -> None:
    source = _folder(tmp_path / "images", 4, set())
    with refuses("broken=maybe", "broken=skip"):
        load_examples(f"{source}?broken=maybe", SPECS)
    assert load_examples(f"{source}?broken=stop", SPECS).count == 4


@pytest.mark.parametrize("skip", [False, True])
def test_saved_sets_name_and_leave_out_broken_images_too(tmp_path: Path, skip: bool) -> None:
    datasets = pytest.importorskip("datasets")
    whole = [image(tmp_path / f"{i}.png", i).read_bytes() for i in range(6)]
    held = [
        {"bytes": one[:45] if i in (2, 4) else one, "path": None} for i, one in enumerate(whole)
    ]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": held, "label": list(range(6))}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "set")
    if not skip:
        with refuses("2 of 6 images", "image 2, image 4", "?broken=skip"):
            load_examples(tmp_path / "set", SPECS)
        return
    found = load_examples(f"{tmp_path / 'set'}?broken=skip", SPECS)
    assert _greys(found) == {0, 1, 3, 5}
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == [0, 1, 3, 5]


def test_a_conversion_goes_on_without_them_and_says_so(tmp_path: Path) -> None:
    source = _folder(tmp_path / "images", 24, {0, 9})
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    asked: dict[str, Any] = {"inputs": ["1x8x8"], "convert_anyway": True, "rank": 4}
    with pytest.raises(DataError, match="2 of 24 images"):
        bp_convert.convert(model, calibrate=str(source), **asked)
    _, report = bp_convert.convert(model, calibrate=f"{source}?broken=skip", **asked)
    assert "22 of 24 examples" in report.calibration
    assert "2 broken images left out" in report.calibration
    assert np.isfinite(report.fit_errors.get(report.layers[0].name, 0))
