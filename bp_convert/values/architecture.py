"""The words that name an architecture, taken apart; nothing is imported, looked up or made."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LIBRARIES = ("torchvision", "timm", "transformers", "bp")


class Architecture(NamedTuple):
    """``SOURCE:NAME?OPTIONS``, as ``--arch`` takes it.

    Attributes:
        source: a library, or the Python file or module whose code makes the model.
        name: what is made of it; of transformers a folder.
        options: what follows the question mark.
    """

    source: str
    name: str
    options: str

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Take a text apart; one without a colon has no source."""
        head, _, options = text.partition("?")
        source, _, name = head.partition(":")
        if source not in LIBRARIES:
            source, _, name = head.rpartition(":")
        return cls(source, name, options)

    @property
    def script(self) -> Path | None:
        """The Python file whose code makes it, if that is one."""
        return Path(self.source) if self.source.endswith(".py") else None

    @property
    def place(self) -> Path | None:
        """The Python file or the transformers folder that must be there."""
        return Path(self.name) if self.source == "transformers" else self.script
