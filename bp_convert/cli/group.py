"""A group of commands whose first one is meant where none is named."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
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
        if not args and not ctx.resilient_parsing:
            args = ["--help"]
        if args and args[0] not in self.commands and args[0].split("=")[0] not in _OWN:
            if not ctx.resilient_parsing:
                self._check_word(ctx, args[0])
            args = [DEFAULT, *args]
        ctx.meta[__name__] = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        """Leave out the group's own options where a command comes first: typer reads each through
        pydantic, even those that were not given, and to load that takes half as long as all help.
        """
        return [] if ctx.meta.get(__name__) else super().get_params(ctx)

    def _check_word(self, ctx: Any, word: str) -> None:
        """Refuse a mistyped command, which would be taken for a file."""
        near = get_close_matches(word, self.commands, n=1, cutoff=0.7)
        if near and not Path(word).exists():
            ctx.fail(f"{word!r} is neither a command nor a file here. Did you mean {near[0]!r}?")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Leave the default command's name out of usage lines."""
        name, command, rest = super().resolve_command(ctx, args)
        return (None if name == DEFAULT else name), command, rest

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the commands, and what the default one takes."""
        default = self.commands[DEFAULT].shell_complete(ctx, incomplete)
        return [*super().shell_complete(ctx, incomplete), *default]
