"""A group of commands whose first one is meant where none is named."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

DEFAULT = "convert"
_OWN = {"--version", "--install-completion", "--show-completion"}


class DefaultContext(typer.Context):
    """The context of the default command, which goes without a name."""

    @property
    def command_path(self) -> str:
        return super().command_path.rstrip()


class DefaultCommand(typer.core.TyperCommand):
    """The default command."""

    context_class = DefaultContext


class DefaultGroup(typer.core.TyperGroup):
    """``bp-convert model.pt`` is ``bp-convert convert model.pt``; so is its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front where the words name none."""
        if not args:
            args = ["--help"]
        if args[0] not in self.commands and args[0].split("=")[0] not in _OWN:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Leave the default command's name out of usage lines."""
        name, command, rest = super().resolve_command(ctx, args)
        return (None if name == DEFAULT else name), command, rest
