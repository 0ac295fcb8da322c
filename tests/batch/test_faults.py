"""Faulty recipes: each error names file and line, what was found, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from bp_convert.batch.book import read_recipe
from bp_convert.batch.sources import check_files, check_scores
from bp_convert.errors import RecipeError
from tests.batch.crafted import write

# Recipe, line, words that the error has to hold, words of what to do.
FAULTS = {
    "unknown key": (
        "arch: bp:svgg\nalhpa: 2\n",
        2,
        "the unknown key 'alhpa'",
        "did you mean 'alpha'",
    ),
    "unknown key far inside": (
        "arch: bp:svgg\njobs:\n  - name: one\n    finetune:\n      steps: 2\n"
        "      weigth_decay: 1\n",
        6,
        "the unknown key 'weigth_decay'",
        "did you mean 'weight_decay'",
    ),
    "wrong type": ("arch: bp:svgg\n\nalpha: wide\n", 3, "'wide'", "correct alpha"),
    "empty matrix": (
        "arch: bp:svgg\nmatrix:\n  alpha: []\n",
        3,
        "an empty list",
        "alpha: [VALUE, VALUE]",
    ),
    "matrix without a list": (
        "arch: bp:svgg\nmatrix:\n  alpha: 2\n",
        3,
        "2",
        "put it into brackets: alpha: [2]",
    ),
    "matrix over an unknown key": (
        "arch: bp:svgg\nmatrix:\n  settings.pears: [fast, paper]\n",
        3,
        "the unknown key 'pears'",
        "did you mean 'pairs'",
    ),
    "bad value in a matrix": (
        "arch: bp:svgg\nmatrix:\n  alpha:\n    - 1\n    - -3\n",
        5,
        "-3",
        "correct alpha",
    ),
    "exclusion of nothing": (
        "arch: bp:svgg\nmatrix:\n  alpha: [1, 2]\n  exclude:\n    - {alpha: 5}\n",
        5,
        "it excludes no combination",
        "compare its values",
    ),
    "missing model": ("alpha: 2\nmodel: nowhere.pt\n", 2, "nothing at nowhere.pt", "the path"),
    "missing data": (
        "arch: bp:svgg\ncalibrate: nowhere.npz\n",
        2,
        "nothing at nowhere.npz",
        "the path",
    ),
    "missing base": ("arch: bp:svgg\nextends: nowhere.yaml\n", 2, "no file", "correct the path"),
    "cycle": ("arch: bp:svgg\nextends: study.yaml\n", 2, "a circle", "remove one of these"),
    "two jobs of one name": (
        "arch: bp:svgg\njobs:\n  - name: one\n  - name: One\n    alpha: 2\n",
        4,
        "the name 'One' is taken by",
        "another name",
    ),
    "a key twice": (
        "arch: bp:svgg\nalpha: 2\nalpha: 3\n",
        3,
        "'alpha' stands here and in line 2",
        "remove one of the two",
    ),
    "no YAML": ("arch: bp:svgg\nsettings: {pairs: paper\nalpha: 2\n", 3, "no YAML", "brackets"),
    "tab": ("arch: bp:svgg\nfinetune:\n\tsteps: 2\n", 3, "no YAML", "not tabs"),
    "no model": ("alpha: 2\n", 1, "model and arch are both absent", "change one of them"),
    "not a target": (
        "arch: bp:svgg\ntarget: params=lots\n",
        2,
        "'params=lots'",
        "write QUANTITY=VALUE",
    ),
    "a target without its quantity": (
        "arch: bp:svgg\nmatrix:\n  target: [params=0.5, 25%]\n",
        3,
        "'25%'",
        "did you mean params=0.25?",
    ),
    "not a target among settings": (
        "arch: bp:svgg\nsettings:\n  target: params=lots\n",
        3,
        "params=lots",
        "params=0.25",
    ),
    "not an input": ("arch: bp:svgg\ninput: 3 by 32\n", 2, "'3 by 32'", "joined by x"),
    "one thing twice": (
        "arch: bp:svgg\nalpha: 2\nsettings: {alpha: 3}\n",
        2,
        "alpha is given twice",
        "change one of them",
    ),
    "rule without a pattern": (
        "arch: bp:svgg\nlayers:\n  - {match: a, keep: true}\n  - {keep: true}\n",
        4,
        "no 'match' here",
        "add `match: ...`",
    ),
    "code that nobody trusts": (
        "arch: models.py:small\n",
        1,
        "models.py would be run",
        "trust: [models.py]",
    ),
    "validated on training data": (
        "arch: models.py:small\ntrust: models.py\n"
        "finetune:\n  data: models.py\n  validation: models.py\n",
        5,
        "which finetune trains on",
        "a tenth is then held out",
    ),
    "key in the matrix and in a job": (
        "arch: bp:svgg\nmatrix: {alpha: [1, 2]}\njobs:\n  - name: one\n    alpha: 3\n",
        5,
        "stands in this job and in the recipe's matrix",
        "remove it here",
    ),
    "a list": ("- arch: bp:svgg\n", 1, "a list", "name keys such as"),
    "name that is no folder": (
        "arch: bp:svgg\njobs:\n  - {name: ../out}\n",
        3,
        "'../out'",
        "correct name",
    ),
    "endless aliases": (
        "arch: bp:svgg\na: &a [x, x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a]\n"
        "c: &c [*b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c]\n"
        "e: &e [*d, *d, *d, *d, *d, *d, *d]\nf: &f [*e, *e, *e, *e, *e, *e, *e]\n",
        2,
        "no end",
        "write the value out",
    ),
}


@pytest.mark.parametrize("name", FAULTS, ids=lambda name: name.replace(" ", "-"))
def test_a_fault_is_named_with_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, line, found, fix = FAULTS[name]
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        _check(path)
    error = caught.value
    assert f"study.yaml, line {line}, column " in error.where, error
    assert found in error.found, error
    assert fix in error.fix, error
    assert error.allowed


def _check(path: Path) -> None:
    for one in read_recipe(path).jobs:
        check_scores(one)
        check_files(one)


def test_a_fault_in_a_base_names_the_base(tmp_path: Path) -> None:
    write(tmp_path, "arch: bp:svgg\nfinetune:\n  stepz: 2\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nalpha: 2\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    assert "base.yaml, line 3, column 3" in caught.value.where


def test_a_longer_circle_is_spelled_out(tmp_path: Path) -> None:
    write(tmp_path, "extends: two.yaml\n", "one.yaml")
    write(tmp_path, "extends: three.yaml\n", "two.yaml")
    write(tmp_path, "extends: one.yaml\n", "three.yaml")
    with pytest.raises(RecipeError, match=r"one\.yaml extends two\.yaml extends three\.yaml"):
        read_recipe(tmp_path / "one.yaml")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_bytes(b"arch: \xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8"):
        read_recipe(path)
