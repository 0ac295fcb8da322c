"""The references of the site are whole: every public name, option, setting, source and message."""

from __future__ import annotations

import ast
import re

import pytest

import bp_convert
from bp_convert.values.training import Distill, Training
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    named = set(re.findall(r"^::: bp_convert\.(\w+)$", text("api.md"), re.MULTILINE))
    assert named == {one for one in bp_convert.__all__ if not one.startswith("__")}


def test_every_setting_of_training_is_explained() -> None:
    page = text("training.md")
    for name in (*Training.model_fields, *(f"distill.{one}" for one in Distill.model_fields)):
        assert f"`{name}" in page, name


def test_the_reference_of_the_command_line_is_whole() -> None:
    hooks: dict[str, object] = {}
    exec(compile((DOCS / "hooks.py").read_text(), "hooks.py", "exec"), hooks)
    made = hooks["reference"]()  # type: ignore[operator]
    for command in ("bp-convert", "bp-convert finetune", "bp-convert recipe run"):
        assert f"## {command}\n" in made
    for option in ("--target", "--calibrate", "--finetune", "--set", "--keep-going"):
        assert f"`{option} " in made or f"`{option}`" in made


def messages() -> str:
    """Return every text in the package's code; what is put in at run time is left out."""
    found = []
    for path in (ROOT / "bp_convert").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts = (getattr(one, "value", "") for one in node.values)
                found.append("".join(one if isinstance(one, str) else "\0" for one in texts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("page", ["troubleshooting.md", "report.md"])
def test_the_messages_explained_are_the_tool_s_own(page: str) -> None:
    every = messages()
    quoted = re.findall(r"^(?:#{3,4} |\| )`(.+?)`", text(page), re.MULTILINE)
    assert len(quoted) >= 10
    for message in quoted:
        for part in message.split("..."):
            assert part.strip() in every, message


def test_the_page_on_data_names_every_option_of_every_source() -> None:
    page = text("data.md")
    for path in sorted((ROOT / "bp_convert" / "data").rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        named = [
            one
            for asked in re.findall(r"admit\(\((.*?)\)\)|OPTIONS = \((.*?)\)", code)
            for one in re.findall(r'"(\w+)"', "".join(asked))
        ]
        for option in named:
            assert f"`{option}=" in page, f"{path.name}: {option}"
