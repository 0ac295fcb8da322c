"""The reference of the command line, made from the commands themselves while the site is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from bp_convert.cli.app import app

PLACE = "<!-- the commands -->"
OWN = {"help", "version", "install_completion", "show_completion"}  # not of one command


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the reference where a page asks for it."""
    return markdown.replace(PLACE, reference()) if PLACE in markdown else markdown


def reference() -> str:
    """Return a section for each command, in Markdown."""
    import typer

    group = typer.main.get_command(app)
    return "\n".join(line for command in _commands(group, "bp-convert") for line in command)


def _commands(group: Any, path: str) -> Iterator[list[str]]:
    for name, command in group.commands.items():
        words = path if name == "convert" else f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, words)
        else:
            yield _section(command, words)


def _section(command: Any, words: str) -> list[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [
        one for one in command.params if one.param_type_name == "option" and one.name not in OWN
    ]
    usage = " ".join([words, *(_metavar(one) for one in arguments), *["[OPTIONS]"][: len(options)]])
    lines = [f"## {words}", "", "```text", usage, "```", "", _text(command.help or ""), ""]
    for one in arguments:
        lines += [f"`{_metavar(one)}`", f":   {_text(one.help or '')}", ""]
    for panel, members in groupby(options, lambda one: one.rich_help_panel or ""):
        title, _, example = panel.partition("   ")
        if title:
            lines += [f"**{title}**" + (f" `{example.strip()}`" if example else ""), ""]
        for one in members:
            lines += [f"`{_flags(one)}`", f":   {_text(one.help or '')}{_default(one)}", ""]
    return lines


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _flags(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return ", ".join(option.opts) + value


def _default(option: Any) -> str:
    unsaid = option.default in (None, False, (), []) or callable(option.default)
    return "" if unsaid or "Default" in (option.help or "") else f" Default: `{option.default}`."


def _text(text: str) -> str:
    """Return help as Markdown, in which < and | stand for themselves."""
    return re.sub(r"[\\[\]*_<|]", lambda found: f"&#{ord(found[0])};", text.strip())
