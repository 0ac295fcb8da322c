"""The user's own loaders, from a file and in Python."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.data.crafted import first_column, load_examples, refuses, scored, spec

HEAD = """
import numpy as np, torch
from torch.utils.data import DataLoader, TensorDataset
rows = torch.arange(12.0)[:, None].expand(12, 3).contiguous()
labels = torch.arange(12)
"""
FORMS = {
    "tensor": "def loader(): return rows",
    "array": "def loader(): return rows.numpy()",
    "pair": "def loader(): return rows, labels",
    "mapping": "def loader(): return {'anything': rows, 'labels': labels}",
    "batches": "loader = list(rows.split(5))",
    "pairs": "loader = list(zip(rows.split(5), labels.split(5)))",
    "lists": "loader = [[r, l] for r, l in zip(rows.split(5), labels.split(5))]",
    "mappings": "loader = [{'x': r, 'y': l} for r, l in zip(rows.split(5), labels.split(5))]",
    "singles": "loader = [(r, int(l)) for r, l in zip(rows, labels)]",
    "mapped singles": "loader = [({'x': r}, int(l)) for r, l in zip(rows, labels)]",
    "set": "def loader(): return TensorDataset(rows, labels)",
    "DataLoader": "loader = DataLoader(TensorDataset(rows, labels), batch_size=5)",
    "shuffled": "loader = DataLoader(TensorDataset(rows, labels), batch_size=5, shuffle=True)",
    "endless": """
def loader():
    while True:
        yield from zip(rows, labels)
""",
    "class": """
class loader:
    def __iter__(self): return iter(zip(rows.split(5), labels.split(5)))
""",
}


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.py").write_text(HEAD + text)
    return f"{tmp_path}/mine.py:loader"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_loader(tmp_path: Path, form: str) -> None:
    source = write(tmp_path, FORMS[form])
    found = load_examples(source, [spec("3")], count=12, batch=4)
    assert sorted(first_column(found)) == list(range(12))
    assert max(len(args[0]) for args, _ in found.batches) <= 4
    if form in {"tensor", "array", "batches"}:
        assert found.labels is None
    else:
        assert found.labels is not None
        assert found.labels.tolist() == first_column(found)


@pytest.mark.parametrize("form", FORMS)
def test_the_parts_never_meet_and_repeat_themselves(tmp_path: Path, form: str) -> None:
    source = write(tmp_path, FORMS[form])
    one = load_examples(source, [spec("3")], count=7, seed=3)
    torch.rand(5)  # another state of the generator
    again = load_examples(source, [spec("3")], count=7, seed=3)
    assert one.digest == again.digest
    assert one.count == 7
    last = scored(source, [spec("3")], taken=7, count=5, seed=3)
    assert sorted(first_column(one) + first_column(last)) == list(range(12))


def test_a_named_input(tmp_path: Path) -> None:
    source = write(tmp_path, FORMS["DataLoader"])
    args, kwargs = load_examples(source, [spec("x=float32:1x3")]).batches[0]
    assert args == ()
    assert set(kwargs) == {"x"}


def test_several_inputs_and_a_label() -> None:
    data = TensorDataset(torch.zeros(6, 3), torch.zeros(6, 2), torch.arange(6))
    found = load_examples(DataLoader(data, batch_size=4), [spec("3"), spec("2")])
    assert len(found.batches[0][0]) == 2
    assert found.labels is not None
    two = TensorDataset(torch.zeros(6, 3), torch.zeros(6, 2))
    assert load_examples(DataLoader(two), [spec("3"), spec("2")]).labels is None
    with refuses("items of 3 parts", "1 inputs"):
        load_examples(DataLoader(data), [spec("3")])
    with refuses("items of 2 parts"):
        load_examples(DataLoader(two), [spec("3"), spec("2"), spec("1")])


def test_without_specs_integers_are_the_label() -> None:
    x, y = torch.zeros(6, 3), torch.arange(6)
    assert load_examples(DataLoader(TensorDataset(x, y), batch_size=3)).labels is not None
    both = load_examples(DataLoader(TensorDataset(x, x), batch_size=3))
    assert both.labels is None
    assert len(both.batches[0][0]) == 2


def test_ragged_batches_stay_as_they_come() -> None:
    batches = [
        {"input_ids": torch.ones(2, n, dtype=torch.int64), "attention_mask": torch.ones(2, n)}
        for n in (3, 5, 4)
    ]
    found = load_examples(batches, [spec("input_ids=int64:1x8<9")], count=5)
    assert [tuple(kw["input_ids"].shape) for _, kw in found.batches] == [(2, 3), (2, 5), (1, 4)]


def test_a_generator_is_read_no_further_than_needed() -> None:
    asked: list[int] = []

    def endless() -> object:
        while True:
            asked.append(1)
            yield torch.zeros(4, 3)

    assert load_examples(endless, [spec("3")], count=6).count == 6
    assert len(asked) == 2


def test_the_global_generators_are_left_as_they_were() -> None:
    def loader() -> object:
        yield torch.tensor([[torch.rand(()), np.random.rand(), random.random()]])

    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    one = load_examples(loader, [spec("3")], seed=1)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[index]
    assert states[2] == random.getstate()
    assert one.digest == load_examples(loader, [spec("3")], seed=1).digest
    assert one.digest != load_examples(loader, [spec("3")], seed=2).digest


def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bp_test_neighbour.py").write_text("import torch\nrows = torch.zeros(3, 2)\n")
    source = write(tmp_path, "import bp_test_neighbour\nloader = [bp_test_neighbour.rows]")
    assert load_examples(source, [spec("2")]).count == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", ("fails with ZeroDivisionError",)),
        ("exit(3)", ("fails with SystemExit",)),
        ("other = 1", ("no 'loader'", "other")),
        ("def loader(): raise OSError('no disk')", ("OSError: no disk",)),
        ("def loader(a): return rows", ("TypeError",)),
        ("loader = 3", ("TypeError",)),
        ("loader = []", ("no examples",)),
        ("def loader(): return iter([])", ("no examples",)),
        ("loader = ['a text']", ("type str",)),
        ("loader = iter([(torch.zeros(2, 3), torch.zeros(3))])", ("2, 3 rows",)),
        ("loader = [torch.zeros(2, 4)]", ("shape 4", "--input 4")),
        ("loader = [torch.zeros(3), torch.zeros(3), torch.ones(4)[:2]]", ("stacked",)),
        ("loader = iter([torch.full((2, 3), float('nan'))])", ("NaN",)),
        ("loader = [[object(), 1]]", ("object",)),
    ],
)
def test_loaders_that_fail(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with refuses("mine.py", *words):
        load_examples(write(tmp_path, text), [spec("3")])


def test_a_loader_that_calibration_has_used_up(tmp_path: Path) -> None:
    source = write(tmp_path, FORMS["pairs"])
    with refuses("12 examples", "calibration has used"):
        scored(source, [spec("3")], taken=12)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with refuses("no file"):
        load_examples(f"{tmp_path}/none.py:loader", [])
    with refuses("the option mean"):
        load_examples(write(tmp_path, FORMS["pairs"]) + "?mean=1", [])
