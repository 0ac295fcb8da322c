"""Plans and recipes that lie: nothing runs, and every error is one of ours."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.batch.book import read_recipe
from bp_convert.errors import BpConvertError, PlanError, RecipeError

Place = tuple[str | int, ...]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.inner(self.norm(self.conv(x)).mean((2, 3))))
        out: Tensor = self.head(inner)
        return out


def places(tree: Any, above: Place = ()) -> Iterator[Place]:
    yield above
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*above, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from places(value, (*above, index))


def put(tree: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    changed = copy.deepcopy(tree)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


VALUES: tuple[Any, ...] = (
    -1, 0, 1, 3, 2**31, 10**12, 10**400, float("nan"), float("inf"), 1.5, True, None, "x", "",
    "a.b", "../..", "__class__", [], {},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("request_", [{"rank": 2}, {"alpha": 2}], ids=str)
def test_an_edited_plan_is_refused_or_carried_out(request_: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    made = bp_convert.plan(model, inputs=["4x8x8"], convert_anyway=True, **request_)
    tree = json.loads(made.model_dump_json(by_alias=True))
    every = [(place, value) for place in places(tree) for value in VALUES]
    refused = 0
    for place, value in random.Random(0).sample(every, 400):
        (tmp_path / "plan.json").write_text(json.dumps(put(tree, place, value)))
        try:
            bp_convert.apply(model, bp_convert.read_plan(tmp_path / "plan.json"))
        except BpConvertError:
            refused += 1
    assert 200 < refused < 400


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("resizes", 0, "after", 0), -1),
        (("resizes", 0, "after", 0), 10**400),
        (("resizes", 2, "after", 0), 2**31),
        (("resizes", 0, "after"), []),
        (("resizes", 0, "name"), "no.such"),
        (("attrs", 0, "module"), "no.such"),
        (("attrs", 0, "attr"), "__class__"),
        (("attrs", 0, "attr"), "forward"),
        (("layers", 1, "factors", "weight", "in"), [0, 0]),
        (("layers", 0, "factors", "weight", "axes"), []),
        (("layers", 0, "factors", "weight", "rank"), 10**400),
        (("inputs", 0, "shape", 0), 2**45),
    ],
    ids=lambda one: str(one)[:40],
)
def test_impossible_plans(place: Place, value: Any, tmp_path: Path) -> None:
    model = Net().eval()
    request = {"rank": 2} if place[:2] == ("layers", 0) else {"alpha": 2}
    made = bp_convert.plan(model, inputs=["4x8x8"], convert_anyway=True, **request)
    tree = put(json.loads(made.model_dump_json(by_alias=True)), place, value)
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    with pytest.raises(BpConvertError):
        bp_convert.apply(model, bp_convert.read_plan(tmp_path / "plan.json"))


@pytest.mark.parametrize("text", ["[" * 100_000, "NaN", "[]", '"x"', "", "{", "\x00"])
def test_plans_that_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError):
        bp_convert.read_plan(tmp_path / "plan.json")


OK = "arch: bp:svgg\n"
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{two}: &{two} [{','.join(['*' + one] * 9)}]\n"
    for one, two in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES = {
    "apply": OK + "name: !!python/object/apply:os.system ['touch MARKER']",
    "object": "!!python/object:os.system {}",
    "name": OK + "alpha: !!python/name:os.system",
    "new": OK + "about: !!python/object/new:os.system ['touch MARKER']",
    "billion laughs": LAUGHS,
    "laughs in a key": OK + LAUGHS.replace("i:", "about:"),
    "cycle": OK + "about: &a [*a]",
    "cycle at the top": "&a {x: *a}",
    "deep list": "[" * 20_000,
    "deep mapping": "{a: " * 20_000,
    "deep indents": "".join(" " * depth + "a:\n" for depth in range(3000)),
    "NaN": OK + "alpha: .nan",
    "infinite": OK + "alpha: .inf",
    "negative": OK + "alpha: -3",
    "overflow": OK + "alpha: 1e400",
    "digits": OK + "seed: " + "9" * 5000,
    "rank": OK + "rank: -5",
    "twice": OK + OK,
    "list": "- a",
    "two documents": OK + "---\n" + OK,
    "path in a name": OK + "name: ../../x",
    "slash in a name": OK + "name: a/b",
    "extends a system file": "extends: /etc/passwd",
    "extends itself": "extends: recipe.yaml",
    "combinations": OK + f"matrix: {{alpha: {[*range(1, 3000)]}, seed: {[*range(3000)]}}}",
    "empty key": OK + 'matrix: {"": [1]}',
    "jobs": OK + "jobs: [[]]",
    "number as a key": "1: 2",
    "list as a key": "? [a]\n: 1",
    "unknown alias": "a: *nope",
    "tab": "a:\n\t- b",
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, tmp_path: Path) -> None:
    path, marker = tmp_path / "recipe.yaml", tmp_path / "marker"
    path.write_text(RECIPES[name].replace("MARKER", str(marker)))
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    assert caught.value.fix
    assert not marker.exists()


def test_a_recipe_of_noise(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(os.urandom(500))
    with pytest.raises(RecipeError):
        read_recipe(path)
