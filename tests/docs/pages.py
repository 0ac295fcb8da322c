"""What stands on the README and on the pages of the site: code, settings, commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SCRIPT = ROOT / "docs" / "digits.py"
# A block is left out where a comment before it says so, with the reason.
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: console, python, yaml, ...
        text: what stands in it.
        why: why it is not run; empty where it is.
    """

    language: str
    text: str
    why: str = ""

    @property
    def file(self) -> str:
        """The file that it is to be saved as: its first line is a comment that names one."""
        named = re.match(r"# ([\w./-]+\.(?:py|yaml))\b", self.text)
        return named[1] if named else ""

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command of a console, and the lines that it is said to print."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, *printed = part.rstrip().splitlines()
            while command.endswith("\\"):
                command = command[:-1] + printed.pop(0).strip()
            yield command.split("    #")[0].strip(), printed


def blocks(page: Path) -> list[Block]:
    """Return a page's blocks."""
    return [
        Block(
            m["language"],
            re.sub(rf"^{m['indent']}", "", m["text"], flags=re.MULTILINE),
            m["why"] or "",
        )
        for m in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]
