"""Recipes read into jobs: sharing, matrices, names, identities."""

from __future__ import annotations

from pathlib import Path

import pytest

from bp_convert.batch.book import Book, read_recipe
from bp_convert.batch.identity import Identities
from bp_convert.values.recipe import Job
from tests.batch.crafted import write


def book(folder: Path, text: str) -> Book:
    return read_recipe(write(folder, text))


def jobs(folder: Path, text: str) -> dict[str, Job]:
    return {one.job.name: one.job for one in book(folder, text).jobs}


def test_one_job_takes_the_recipe_s_name(tmp_path: Path) -> None:
    found = book(tmp_path, "arch: bp:svgg\nalpha: 2\n")
    assert [one.job.name for one in found.jobs] == ["study"]
    assert found.output == Path("runs/study")


def test_a_matrix_is_a_product_without_its_exclusions(tmp_path: Path) -> None:
    found = jobs(
        tmp_path,
        """
arch: bp:svgg
matrix:
  alpha: [1, 2]
  settings.pairs: [fast, paper]
  seed: [7]
  exclude:
    - {alpha: 1, settings.pairs: paper}
""",
    )
    assert list(found) == ["alpha=1-pairs=fast", "alpha=2-pairs=fast", "alpha=2-pairs=paper"]
    assert {job.request.seed for job in found.values()} == {7}
    assert found["alpha=2-pairs=paper"].request.pairs == "paper"
    assert found["alpha=2-pairs=fast"].request.alpha == 2


def test_nearer_wins_and_mappings_go_together(tmp_path: Path) -> None:
    write(
        tmp_path,
        "arch: bp:svgg\noutput: elsewhere\nfinetune: {epochs: 3, lr: 0.1, batch: 8}\n"
        "layers: [{match: a, keep: true}]\n",
        "base.yaml",
    )
    found = jobs(
        tmp_path,
        """
extends: base.yaml
defaults:
  finetune: {batch: 16}
  seed: 3
seed: 4
jobs:
  - name: steps
    finetune: {steps: 5}
  - name: none
    finetune: null
    layers: []
  - name: many
    matrix: {alpha: [1, 2], finetune.lr: [1e-3]}
""",
    )
    assert list(found) == ["steps", "none", "many-alpha=1", "many-alpha=2"]
    steps = found["steps"].finetune
    assert steps is not None
    assert (steps.steps, steps.epochs, steps.lr, steps.batch) == (5, None, 0.1, 8)
    assert found["none"].finetune is None
    assert found["none"].layers == ()
    assert found["steps"].layers[0].match == "a"
    many = found["many-alpha=2"].finetune
    assert many is not None
    assert many.lr == 0.001
    assert found["many-alpha=2"].request.seed == 4
    assert read_recipe(tmp_path / "study.yaml").output == Path("runs/study")


def test_every_job_of_a_list_goes_through_the_matrix(tmp_path: Path) -> None:
    found = jobs(
        tmp_path,
        """
matrix:
  arch: ["bp:svgg", "torchvision:resnet18?num_classes=10"]
jobs:
  - {name: full, counterpart: full}
  - {name: wide, alpha: 2}
""",
    )
    assert list(found) == ["full-svgg", "wide-svgg", "full-resnet18", "wide-resnet18"]


def test_plain_words_stay_words(tmp_path: Path) -> None:
    text = "arch: bp:svgg\nabout: no\nfinetune: {precision: no, steps: 1_000, lr: 1e-4}\n"
    job = jobs(tmp_path, text)["study"]
    assert job.finetune is not None
    assert (job.finetune.precision, job.finetune.steps, job.finetune.lr) == ("no", 1000, 1e-4)


def test_merge_keys_and_json(tmp_path: Path) -> None:
    found = jobs(
        tmp_path,
        """
arch: bp:svgg
jobs:
  - &first {name: one, alpha: 2, seed: 1}
  - {<<: *first, name: two, alpha: 3}
""",
    )
    assert (found["two"].request.alpha, found["two"].request.seed) == (3, 1)
    path = write(tmp_path, '{"arch": "bp:svgg", "matrix": {"alpha": [1, 2]}}', "study.json")
    assert len(read_recipe(path).jobs) == 2


def test_an_identity_follows_everything_that_a_result_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "arch: models.py:small\ntrust: models.py\ncalibrate: data.npz\nalpha: 2\n"
    (tmp_path / "data.npz").write_bytes(b"one")

    def identity(change: str = "") -> str:
        return Identities().of(jobs(tmp_path, text + change)["study"])

    first = identity()
    assert identity() == first
    assert identity("paper: {score: 80}\n") == first  # stands beside a result, does not make it
    assert identity("seed: 1\n") != first
    (tmp_path / "data.npz").write_bytes(b"two")
    assert identity() != first
    (tmp_path / "data.npz").write_bytes(b"one")
    assert identity() == first
    monkeypatch.setattr("bp_convert.batch.identity.__version__", "99")
    assert identity() != first
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    factory = tmp_path / "models.py"
    job = jobs(tmp_path, text)["study"]
    factory.write_text(factory.read_text() + "\n# changed\n")
    assert Identities().of(job) != first


def test_jobs_of_one_training_share_their_full_model(tmp_path: Path) -> None:
    found = jobs(
        tmp_path,
        """
arch: bp:svgg
train: {data: FashionMNIST, epochs: 1}
jobs:
  - {name: one, alpha: 2}
  - {name: two, rank: 3, evaluate: FashionMNIST}
  - {name: three, alpha: 2, train: {epochs: 2}}
""",
    )
    full = {name: Identities().of_full(job) for name, job in found.items()}
    assert full["one"] == full["two"] != full["three"]
