"""What was measured on a machine, kept in the cache folder: prices of layers, times of models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bp_convert.prices import Counts
from bp_convert.provenance import cpu_name

PRICES = "prices.json"
FORM = 2  # of what is kept and how it is measured: a change makes old files unused


def cache_base() -> Path:
    """Return the cache folder: ``BP_CONVERT_CACHE``, else the user's."""
    own = os.environ.get("BP_CONVERT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bp-convert"


@dataclass(frozen=True)
class Host:
    """Where layers run: what their times hang on besides themselves.

    Attributes:
        device: such as ``cpu`` or ``cuda``.
        threads: of torch.
        dtype: floating type of the weights, such as ``float32``.
    """

    device: str = "cpu"
    threads: int = 1
    dtype: str = "float32"

    @property
    def chip(self) -> str:
        """Name of what computes."""
        if self.device.startswith("cuda") and torch.cuda.is_available():
            return str(torch.cuda.get_device_name(torch.device(self.device)))
        return cpu_name()

    @property
    def words(self) -> str:
        """It in words."""
        many = "" if self.device != "cpu" else f", {self.threads} thread{'s'[: self.threads > 1]}"
        return f"{self.chip}{many}, {self.dtype}, torch {torch.__version__}"


@dataclass(frozen=True)
class MachineTable:
    """The prices that were measured at a host.

    Attributes:
        host: it.
        prices: by kind and side, as in ``speed.json``.
        off: median relative difference between the times measured and by the prices.
        seconds: that it took to measure.
    """

    host: Host
    prices: Mapping[str, Counts]
    off: float = 0.0
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """It in words."""
        return f"tuned on {self.host.words}"


def read_table(host: Host) -> MachineTable | None:
    """Return what was measured at a place; None where nothing was."""
    held = _read(_folder(host) / PRICES)
    try:
        prices = {
            str(name): {str(what): float(one) for what, one in counts.items()}
            for name, counts in held["prices"].items()
        }
        return MachineTable(host, prices, float(held["off"]), float(held["seconds"]))
    except (AttributeError, KeyError, TypeError, ValueError):  # not there, or damaged
        return None


def write_table(table: MachineTable) -> None:
    """Keep what was measured, and forget the times of models there; a folder that cannot be
    written to is no error."""
    folder = _folder(table.host)
    with contextlib.suppress(OSError):
        for old in folder.glob("*.json"):
            old.unlink(missing_ok=True)
    held = {"place": table.host.words, "off": table.off, "seconds": table.seconds}
    _write(folder / PRICES, {**held, "prices": dict(table.prices)})


def key_of_times(*words: str) -> str:
    """Return a hash of words that say what was timed."""
    return hashlib.blake2b("|".join(words).encode(), digest_size=16).hexdigest()


def read_times(host: Host, key: str) -> dict[str, float] | None:
    """Return the times kept under a key, in microseconds by name; None where there are none."""
    held = _read(_folder(host) / f"{key}.json")
    try:
        return {str(name): float(one) for name, one in held.items()} or None
    except (TypeError, ValueError):
        return None


def write_times(host: Host, key: str, times: Mapping[str, float]) -> None:
    """Keep times under a key; a folder that cannot be written to is no error."""
    _write(_folder(host) / f"{key}.json", dict(times))


def _folder(host: Host) -> Path:
    text = "|".join((str(FORM), host.device, host.words))
    return cache_base() / "tuned" / key_of_times(text)


def _read(path: Path) -> dict[str, Any]:
    found: Any = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _write(path: Path, held: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / "made.json"
            made.write_text(json.dumps(held, indent=1), encoding="utf-8")
            made.replace(path)
