"""What names a source: a path or a name, then options after a question mark."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from bp_convert.errors import DataError

FORMS = (
    "a folder of images (class subfolders give labels; train and val subfolders are kept apart), "
    "a folder that datasets' save_to_disk made, a .npy, .npz, .safetensors or .txt file, "
    "FILE.py:LOADER, or the name of a torchvision data set such as FashionMNIST; options follow "
    "a question mark, as in images?mean=0.5&std=0.5, images?broken=skip or FashionMNIST?root=data"
)


@dataclass(frozen=True)
class Locator:
    """A source as the user wrote it, split.

    Attributes:
        text: all of it, for messages.
        name: the part before the question mark.
        options: what follows it.
    """

    text: str
    name: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, source: str | Path) -> Locator:
        """Split a source; a path that exists as written has no options.

        Raises:
            DataError: the options are not of the form name=value&name=value.
        """
        text = str(source)
        if isinstance(source, Path) or Path(text).expanduser().exists():
            return cls(text, text)
        name, _, query = text.partition("?")
        try:
            pairs = parse_qsl(query, strict_parsing=True, separator="&") if query else []
        except ValueError:
            raise cls(text, name).bad(
                f"options {query!r}",
                "name=value&name=value after the ?",
                "write for example images?mean=0.5,0.5,0.5&std=0.5,0.5,0.5",
            ) from None
        return cls(text, name, dict(pairs))

    @property
    def where(self) -> str:
        """Name the source in an error."""
        return f"data {self.text}"

    def bad(self, found: str, allowed: str, fix: str) -> DataError:
        """Return the error of this source."""
        return DataError(where=self.where, found=found, allowed=allowed, fix=fix)

    @property
    def path(self) -> Path:
        """The name as a path."""
        return Path(self.name).expanduser()

    def is_same(self, other: Locator) -> bool:
        """Tell whether both name one source, options such as ``?mean=`` aside."""
        if self.name == other.name:
            return True
        there = self.path.exists() and other.path.exists()
        return there and self.path.samefile(other.path)

    def admit(self, allowed: Collection[str]) -> None:
        """Refuse options that this kind of source does not have.

        Raises:
            DataError: an option is unknown here.
        """
        for key in self.options:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1)
                raise self.bad(
                    f"the option {key}",
                    f"options: {', '.join(allowed) or 'none for this kind of source'}",
                    f"did you mean {near[0]}?" if near else "leave it out",
                )

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """Read an option of numbers joined by commas.

        Raises:
            DataError: it holds something else.
        """
        if key not in self.options:
            return None
        try:
            return tuple(float(one) for one in self.options[key].split(","))
        except ValueError:
            raise self.bad(
                f"{key}={self.options[key]}",
                "numbers joined by commas, one a channel",
                f"write for example {key}=0.5,0.5,0.5",
            ) from None
