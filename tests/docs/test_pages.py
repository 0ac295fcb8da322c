"""Every command and every piece of code on the README and on the site runs, page by page."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from bp_convert.batch.book import read_recipe
from bp_convert.cli.app import app
from bp_convert.cli.reading import settings_from
from tests.docs.pages import PAGES, ROOT, SCRIPT, blocks

LONG = ("data", "recipes", "results", "tutorial")
RUN = [
    pytest.param(page, id=page.name, marks=[pytest.mark.long] if page.stem in LONG else [])
    for page in PAGES
    if any(one.language in ("console", "python") and not one.why for one in blocks(page))
]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the tutorial begins with: its model and its data, made once for all."""
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "digits"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            made = shared.with_name("digits-part")
            made.mkdir()
            subprocess.run([sys.executable, str(SCRIPT)], cwd=made, check=True)
            made.rename(shared)
    return shared


@pytest.fixture
def folder(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BP_CONVERT_CACHE", str(digits.parent / "digits-planned"))  # once for all
    return tmp_path


def words(said: str) -> set[str]:
    """Return the words of an output: numbers and line ends differ from machine to machine."""
    return set(re.findall(r"\b[A-Za-z]{3,}\b", said))


def run(command: str) -> str:
    """Run a command; return what it printed."""
    name, *rest = shlex.split(command)
    if [name, *rest] == ["python", SCRIPT.name]:
        return ""  # the folder begins with what it makes
    if name == "bp-convert":
        result = CliRunner().invoke(app, rest)
        assert result.exit_code == 0, f"{command}\n{result.output}\n{result.stderr}"
        return result.stdout
    assert name == "python", command
    script = [sys.executable, str(ROOT / rest[0]), *rest[1:]]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_page_runs_from_top_to_bottom(page: Path, folder: Path) -> None:
    scope: dict[str, Any] = {}
    for block in blocks(page):
        if block.why:
            continue
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), scope)
        elif block.language == "console":
            for command, printed in block.commands():
                found = run(command)
                if command.startswith("python benchmarks/"):  # its rows are the page's table
                    assert found
                    assert all(line in page.read_text() for line in found.splitlines())
                unsaid = words("\n".join(printed)) - words(found)
                assert not unsaid, f"{command} does not print {unsaid}:\n{found}"


def test_what_a_page_names_exists() -> None:
    make = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:bp_convert|benchmarks|recipes|tests)/[\w/.-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for block in blocks(page):
            for command, _ in block.commands() if block.language == "console" else ():
                words = command.split()
                named = [one for one in words if one.startswith(("benchmarks/", "recipes/"))]
                assert all((ROOT / one).exists() for one in named), f"{page.name}: {command}"
                if words[0] == "make":
                    assert f"\n{words[1]}:" in make, f"{page.name}: {command}"


def test_every_room_has_its_line() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "bp_convert").glob("*/__init__.py")}
    assert rooms
    assert [one for one in sorted(rooms) if f"`bp_convert/{one}/`" not in text] == []


def test_recipes_and_settings_that_are_shown_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    for page in PAGES:
        for block in blocks(page):
            if block.language == "yaml":
                file.write_text(block.text)
                rules_alone = "jobs:" not in block.text and "matrix:" not in block.text
                assert settings_from(file) if rules_alone else read_recipe(file)


def test_what_is_not_run_says_why() -> None:
    """Benchmarks take from minutes to hours and are named with their numbers; the rest needs what
    a test has not: a network, an environment of its own, several processes."""
    for page in PAGES:
        for block in blocks(page):
            if block.why:
                assert block.why.startswith(("needs ", "takes ", "makes ")), block.why


def test_the_readme_shows_the_tutorial_s_script() -> None:
    shown = [one.text for one in blocks(ROOT / "README.md") if one.file == "digits.py"]
    assert shown == [SCRIPT.read_text()]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_ci_runs_what_the_readme_tests_with() -> None:
    commands = [c for one in blocks(ROOT / "README.md") for c, _ in one.commands()]
    assert "make test" in commands
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make docs" in (ROOT / ".ci" / "run").read_text()
