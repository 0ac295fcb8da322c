"""Arrays in files: names, labels, shapes, kinds of numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bp_convert.data import Uses, from_tensors, split_for
from bp_convert.errors import DataError
from tests.data.crafted import first_column, load_examples, numbered, refuses, scored, spec


def test_npy_holds_the_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(10, 3).astype(np.float64))
    found = load_examples(tmp_path / "x.npy", [spec("3")], batch=4)
    assert [len(args[0]) for args, _ in found.batches] == [4, 4, 2]
    assert {args[0].dtype for args, _ in found.batches} == {torch.float32}
    assert sorted(first_column(found)) == list(range(10))
    assert found.labels is None
    assert found.count == 10
    assert "10 of 10 examples" in found.source
    assert "512 asked for" in found.source


def test_enough_examples_are_not_called_fewer(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(10, 3))
    found = load_examples(tmp_path / "x.npy", [spec("3")], count=5)
    assert "5 of 10 examples" in found.source
    assert "asked for" not in found.source


def test_a_named_input_is_given_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(4, 3))
    args, kwargs = load_examples(tmp_path / "x.npy", [spec("x=float32:1x3")]).batches[0]
    assert args == ()
    assert list(kwargs) == ["x"]


@pytest.mark.parametrize("name", ["labels", "label", "targets", "y"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("column", [False, True])
def test_labels_keep_to_their_inputs(tmp_path: Path, name: str, suffix: str, column: bool) -> None:
    labels = np.arange(10, dtype=np.int32).reshape((10, 1) if column else (10,))
    path = tmp_path / f"data{suffix}"
    if suffix == ".npz":
        np.savez(path, anything=numbered(10, 3), **{name: labels})
    else:
        tensors = {"anything": torch.from_numpy(numbered(10, 3)), name: torch.from_numpy(labels)}
        save_file(tensors, path)
    found = load_examples(path, [spec("3")], count=7, batch=4)
    assert found.labels is not None
    assert found.labels.dtype == torch.int64
    assert found.labels.tolist() == first_column(found)
    assert found.labels.tolist() != sorted(found.labels.tolist())  # it did shuffle
    assert [None if one is None else len(one) for one in found.split_labels()] == [4, 3]


def test_the_only_array_is_the_input_whatever_its_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", y=numbered(4, 3))
    found = load_examples(tmp_path / "x.npz", [spec("3")])
    assert found.labels is None
    assert found.count == 4


def test_several_inputs_go_by_name_and_the_mask_comes_along(tmp_path: Path) -> None:
    ids = np.arange(20).reshape(4, 5)
    np.savez(
        tmp_path / "x.npz", input_ids=ids, attention_mask=ids > 3, image=numbered(4, 3), y=[0] * 4
    )
    specs = [spec("image=float32:1x3"), spec("input_ids=int64:1x8<20")]
    found = load_examples(tmp_path / "x.npz", specs)
    args, kwargs = found.batches[0]
    assert args == ()
    assert set(kwargs) == {"image", "input_ids", "attention_mask"}
    assert torch.equal(kwargs["input_ids"][:, 0], 5 * kwargs["image"][:, 0].long())
    assert found.labels is not None


def test_inputs_without_names_go_by_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", numbered(4, 3), np.ones((4, 2), np.int64))
    args, kwargs = load_examples(tmp_path / "x.npz", [spec("3"), spec("int64:1x2")]).batches[0]
    assert [tuple(one.shape) for one in args] == [(4, 3), (4, 2)]
    assert kwargs == {}
    args, _ = load_examples(tmp_path / "x.npz", []).batches[0]
    assert [tuple(one.shape) for one in args] == [(4, 3), (4, 2)]


def test_an_input_called_y_is_an_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=numbered(4, 3), y=numbered(4, 2))
    specs = [spec("x=float32:1x3"), spec("y=float32:1x2")]
    found = load_examples(tmp_path / "x.npz", specs)
    assert set(found.batches[0][1]) == {"x", "y"}
    assert found.labels is None


def test_without_specs_the_data_decides(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones((4, 7), np.int16), b=numbered(4, 2, 2))
    args, kwargs = load_examples(tmp_path / "x.npz", []).batches[0]
    assert args == ()
    assert kwargs["a"].dtype == torch.int16
    assert tuple(kwargs["b"].shape) == (4, 2, 2)


def test_what_a_model_runs_on_says_more_than_a_guess_of_its_input(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))  # a row of 64 is the guess
    np.save(tmp_path / "x.npy", numbered(4, 1, 8, 8))
    found = split_for(model, Uses(tmp_path / "x.npy", evaluate=tmp_path / "x.npy", count=2))
    assert found.calibrate is not None
    assert found.evaluate is not None
    assert found.calibrate.examples.batches[0][0][0].shape == (2, 1, 8, 8)
    assert found.evaluate.examples.batches[0][0][0].shape == (2, 1, 8, 8)
    np.save(tmp_path / "x.npy", numbered(4, 1, 8, 9))
    with pytest.raises(DataError, match=r"1x8x9(.|\n)*64"):
        _ = split_for(model, Uses(tmp_path / "x.npy")).calibrate


def test_big_endian_and_unsigned_numbers_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(4, 3).astype(">f4"))
    assert sorted(first_column(load_examples(tmp_path / "x.npy", [spec("3")]))) == [0, 1, 2, 3]
    np.save(tmp_path / "u.npy", np.full((4, 3), 65535, np.uint16))
    assert first_column(load_examples(tmp_path / "u.npy", [spec("int64:1x3")])) == [65535] * 4


def test_an_array_of_another_size_names_both_and_what_to_do(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(4, 3, 16, 16))
    with refuses("3x16x16", "3x8x8", "--input 3x16x16"):
        load_examples(tmp_path / "x.npy", [spec("3x8x8")])
    assert load_examples(tmp_path / "x.npy", [spec("3x16x16")]).count == 4


def test_length_of_ids_is_free_and_their_axes_are_not(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 30), np.int64))
    assert load_examples(tmp_path / "x.npy", [spec("int64:1x8<5")]).count == 4
    np.save(tmp_path / "x.npy", np.zeros((4, 30, 2), np.int64))
    with refuses("30x2"):
        load_examples(tmp_path / "x.npy", [spec("int64:1x8<5")])


def test_kinds_of_numbers_do_not_mix(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 3), np.uint8))
    with refuses("uint8", "float32", "/ 255"):
        load_examples(tmp_path / "x.npy", [spec("3")])
    np.save(tmp_path / "x.npy", numbered(4, 3))
    with refuses("float32", "int64"):
        load_examples(tmp_path / "x.npy", [spec("int64:1x3")])


@pytest.mark.parametrize(("value", "fits"), [(9, True), (10, False), (-1, False)])
def test_ids_stay_below_the_bound(tmp_path: Path, value: int, fits: bool) -> None:
    np.save(tmp_path / "x.npy", np.full((4, 3), value))
    if fits:
        assert load_examples(tmp_path / "x.npy", [spec("int64:1x3<10")]).count == 4
        return
    with refuses("tokenizer does not fit", "0 to 9"):
        load_examples(tmp_path / "x.npy", [spec("int64:1x3<10")])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_are_finite(tmp_path: Path, value: float) -> None:
    data = numbered(4, 3)
    data[2, 1] = value
    np.save(tmp_path / "x.npy", data)
    for specs in ([spec("3")], []):
        with refuses("NaN or infinite", "1 of 12"):
            load_examples(tmp_path / "x.npy", specs)


def test_float64_that_overflows_the_models_dtype_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((4, 3), 1e300))
    with refuses("infinite"):
        load_examples(tmp_path / "x.npy", [spec("3")])


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    array = np.array([Trap()], dtype=object)
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", array)
    for name in ("x.npy", "x.npz"):
        with refuses("Python objects"):
            load_examples(tmp_path / name, [])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00 damaged", b"PK\x03\x04damaged"])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with refuses(name, "cannot be read"):
        load_examples(tmp_path / name, [])


def test_text_and_single_numbers_and_no_rows_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array(["a", "b"]))
    with refuses("<U1"):
        load_examples(tmp_path / "x.npy", [])
    for empty in (np.zeros((0, 3), np.float32), np.float32(1)):
        np.save(tmp_path / "x.npy", empty)
        with refuses("no examples"):
            load_examples(tmp_path / "x.npy", [])


def test_rows_must_be_as_many_in_every_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=numbered(4, 3), labels=np.zeros(5, np.int64))
    with refuses("x 4", "labels 5"):
        load_examples(tmp_path / "x.npz", [spec("3")])


def test_unknown_and_missing_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=numbered(4, 3), x_test=numbered(4, 3))
    with refuses("x_train, x_test"):
        load_examples(tmp_path / "x.npz", [spec("3")])
    with refuses("x_train, x_test", "a=float32"):
        load_examples(tmp_path / "x.npz", [spec("a=float32:1x3"), spec("b=float32:1x3")])
    np.save(tmp_path / "x.npy", numbered(4, 3))
    with refuses("one array for each input"):
        load_examples(tmp_path / "x.npy", [spec("3"), spec("4")])


def test_bfloat16_survives(tmp_path: Path) -> None:
    save_file({"x": torch.arange(4.0).bfloat16()[:, None]}, tmp_path / "x.safetensors")
    found = load_examples(tmp_path / "x.safetensors", [])
    assert found.batches[0][0][0].dtype == torch.bfloat16
    assert sorted(first_column(found)) == [0, 1, 2, 3]
    assert len(found.digest) == 16


def test_tensors_keep_their_order_unless_some_are_chosen() -> None:
    x, labels = torch.from_numpy(numbered(10, 2)), torch.arange(10)
    whole = from_tensors(x, labels, [spec("2")], batch=4)
    assert first_column(whole) == list(range(10))
    some = from_tensors(x, labels, count=4, seed=1)
    assert some.labels is not None
    assert some.labels.tolist() == first_column(some)
    assert len(set(first_column(some))) == 4
    last = scored(x, [], taken=4, count=4, seed=1)
    assert not set(first_column(last)) & set(first_column(some))


def test_tensors_by_name_and_by_place() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4, 3)
    assert from_tensors({"y": y, "x": x}).batches[0][1].keys() == {"x", "y"}
    args, kwargs = from_tensors([x, y]).batches[0]
    assert [one.shape[1] for one in args] == [2, 3]
    assert kwargs == {}
    assert from_tensors([x, y], None, [spec("a=float32:1x2"), spec("b=float32:1x3")]).batches[0][
        1
    ].keys() == {"a", "b"}
    with refuses("input 1 4", "the labels 3"):
        from_tensors(x, torch.zeros(3))
    with refuses("inputs x", "2"):
        from_tensors({"x": x}, None, [spec("2")])
    with refuses("list"):
        from_tensors([[1.0, 2.0]])  # type: ignore[list-item]
    with refuses("no examples"):
        from_tensors(torch.zeros(0, 3))
