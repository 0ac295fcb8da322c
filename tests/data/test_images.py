"""Folders of images and torchvision's data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from bp_convert.data.factory import open_data
from bp_convert.data.images import IMAGENET
from tests.data.crafted import fashion, first_column, image, load_examples, refuses, scored, spec
from tests.tolerances import assert_near


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    for place, name in enumerate(("zebra", "ant", "cat")):
        for i in range(3):
            image(tmp_path / name / f"{i}.png", 100 * place)
    (tmp_path / "bee").mkdir()  # an empty class keeps its number
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "readme.md").write_text("not an image")
    found = load_examples(tmp_path, [spec("1x8x8")])
    assert found.labels is not None
    number = {0: 3, 100: 0, 200: 2}
    greys = [round(255 * value) for value in first_column(found)]
    assert found.labels.tolist() == [number[grey] for grey in greys]
    assert len(set(greys)) == 3


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for i in range(5):
        image(tmp_path / f"{i}.png", 50 * i)
    found = load_examples(tmp_path, [spec("1x8x8")], count=3, batch=2)
    assert found.labels is None
    assert [len(args[0]) for args, _ in found.batches] == [2, 1]
    assert set(first_column(found)) <= {np.float32(50 * i / 255) for i in range(5)}


def test_only_chosen_files_are_decoded(tmp_path: Path) -> None:
    for i in range(20):
        image(tmp_path / f"{i:02}.png", i)
    chosen = first_column(load_examples(tmp_path, [spec("1x8x8")], count=3))
    kept = {0, *(round(255 * value) for value in chosen)}  # the first one tells the colours
    for i in set(range(20)) - kept:
        (tmp_path / f"{i:02}.png").write_bytes(b"damaged")
    assert load_examples(tmp_path, [spec("1x8x8")], count=3).count == 3
    with refuses("cannot be read", ".png"):
        load_examples(tmp_path, [spec("1x8x8")])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    image(tmp_path / "a.png", 1)
    whole = image(tmp_path / "b.png", (1, 2, 3), (64, 64)).read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    with refuses("b.png", "cannot be read"):
        load_examples(tmp_path, [spec("1x8x8")])


def test_normalised_as_imagenet_by_default(tmp_path: Path) -> None:
    image(tmp_path / "a.png", (255, 0, 51))
    x = load_examples(tmp_path, [spec("3x8x8")]).batches[0][0][0]
    mean, std = (torch.tensor(one) for one in IMAGENET)
    expected = (torch.tensor([1.0, 0.0, 0.2]) - mean) / std
    assert x.shape == (1, 3, 8, 8)
    assert_near(x[0, :, 4, 4], expected)


def test_options_replace_the_normalisation(tmp_path: Path) -> None:
    image(tmp_path / "a.png", (255, 0, 51))
    source = f"{tmp_path}?mean=0.5,0.5,0.2&std=0.5,0.25,1"
    x = load_examples(source, [spec("3x8x8")]).batches[0][0][0]
    assert_near(x[0, :, 0, 0], torch.tensor([1.0, -2.0, 0.0]))
    grey = load_examples(f"{tmp_path}?mean=0.5&std=0.5", [spec("3x8x8")]).batches[0][0][0]
    assert_near(grey[0, :, 0, 0], torch.tensor([1.0, -1.0, -0.6]))
    for bad, word in (("mean=0,0", "mean=0.0,0.0"), ("std=0", "std"), ("mean=a", "numbers")):
        with refuses(word):
            load_examples(f"{tmp_path}?{bad}", [spec("3x8x8")])
    with refuses("the option means", "did you mean mean"):
        load_examples(f"{tmp_path}?means=1", [spec("3x8x8")])


@pytest.mark.parametrize(("width", "height"), [(64, 16), (20, 50), (8, 8), (30, 30), (4, 6)])
def test_the_shorter_side_is_scaled_and_the_centre_cut(
    tmp_path: Path, width: int, height: int
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width), np.uint8)
    made = Image.fromarray(pixels)
    made.save(tmp_path / "a.png")
    x = load_examples(tmp_path, [spec("1x8x8")]).batches[0][0][0]
    usual = transforms.Compose([transforms.Resize(8), transforms.CenterCrop(8)])(made)
    expected = torch.from_numpy(np.array(usual, np.float32)) / 255
    assert_near(x[0, 0], expected)
    assert float((x[0, 0] - expected.T).abs().max()) > 0.1


def test_an_input_that_is_not_square_is_filled(tmp_path: Path) -> None:
    pixels = np.zeros((16, 64), np.uint8)
    pixels[:, 24:40] = 255  # the middle quarter is white
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    x = load_examples(tmp_path, [spec("1x8x16")]).batches[0][0][0]
    assert x.shape == (1, 1, 8, 16)
    assert_near(x[0, 0, :, [0, 8, 15]], torch.tensor([0.0, 1.0, 0.0]).expand(8, 3))


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 51, [0.2] * 3),
        ("RGBA", (255, 0, 51, 128), [1, 0, 0.2]),
        ("1", 1, [1] * 3),
        ("I;16", 13107, [0.2] * 3),
        ("P", 1, None),
    ],
)
def test_every_colour_mode_becomes_three_channels(
    tmp_path: Path, mode: str, value: object, expected: list[float] | None
) -> None:
    made = Image.new(mode, (8, 8), value)  # type: ignore[arg-type]
    if mode == "P":
        made.putpalette([0, 0, 0, 255, 0, 51])
        made.info["transparency"] = b"\x00\x80"
        expected = [1, 0, 0.2]
    made.save(tmp_path / "a.png")
    x = load_examples(f"{tmp_path}?mean=0&std=1", [spec("3x8x8")]).batches[0][0][0]
    assert_near(x[0, :, 3, 3], torch.tensor(expected, dtype=torch.float32))


def test_without_specs_the_first_image_decides(tmp_path: Path) -> None:
    image(tmp_path / "a.png", 7, (6, 9))
    image(tmp_path / "b.png", (7, 7, 7), (20, 20))
    assert load_examples(tmp_path, []).batches[0][0][0].shape == (2, 1, 9, 6)


def test_a_named_input_is_given_by_name(tmp_path: Path) -> None:
    image(tmp_path / "a.png", 7)
    args, kwargs = load_examples(tmp_path, [spec("pixel_values=float32:1x3x8x8")]).batches[0]
    assert args == ()
    assert kwargs["pixel_values"].shape == (1, 3, 8, 8)


def test_folders_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with refuses("no image"):
        load_examples(tmp_path, [])
    image(tmp_path / "train" / "cat" / "a.png", 1)
    with refuses("images only deeper", f"name the folder {tmp_path / 'train'}"):
        load_examples(tmp_path, [])
    assert load_examples(tmp_path / "train", []).count == 1
    image(tmp_path / "train" / "a.png", 1)
    with refuses("both in it and in its subfolder cat"):
        load_examples(tmp_path / "train", [])


def test_models_of_other_inputs_are_refused(tmp_path: Path) -> None:
    image(tmp_path / "a.png", 1)
    for specs in (["8x8"], ["int64:1x3x8x8"], ["3x8x8", "4"], ["2x8x8"]):
        with refuses("images"):
            load_examples(tmp_path, [spec(text) for text in specs])


def test_torchvision_sets_have_a_split_for_each_part(tmp_path: Path) -> None:
    fashion(tmp_path, train=[10, 21, 32, 43], test=[101, 112])
    source = f"FashionMNIST?root={tmp_path}&mean=0&std=1"
    train = load_examples(source, [spec("1x28x28")])
    assert sorted(round(255 * v) for v in first_column(train)) == [10, 21, 32, 43]
    test = scored(source, [spec("1x28x28")], taken=4)
    greys = [round(255 * v) for v in first_column(test)]
    assert sorted(greys) == [101, 112]
    assert test.labels is not None
    assert test.labels.tolist() == [grey % 10 for grey in greys]
    grown = load_examples(f"{source}&mean=0.5&std=0.5", [spec("3x32x32")], count=1)
    assert grown.batches[0][0][0].shape == (1, 3, 32, 32)


def test_a_missing_torchvision_set_says_where_its_files_belong(tmp_path: Path) -> None:
    with refuses(str(tmp_path / "FashionMNIST" / "raw"), "nothing is downloaded", "?root=FOLDER"):
        load_examples(f"FashionMNIST?root={tmp_path}", [spec("1x28x28")])
    with refuses(str(tmp_path / "cifar-10-batches-py")):
        load_examples(f"CIFAR10?root={tmp_path}", [spec("3x32x32")])
    for name in ("SVHN", "Food101", "Imagenette", "STL10"):
        with refuses(str(tmp_path), "nothing is downloaded"):
            open_data(f"{name}?root={tmp_path}", [spec("3x32x32")], part="test")
    with refuses("options of its own", "FILE.py:LOADER"):
        load_examples(f"EMNIST?root={tmp_path}", [spec("1x28x28")])
    assert list(tmp_path.rglob("*")) == []
