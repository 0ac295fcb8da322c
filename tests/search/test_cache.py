from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bp_convert.search import cache
from bp_convert.search.curves import Curve
from bp_convert.values.factors import FactorSpec

CURVES = [
    Curve(FactorSpec(out=(2, 3), inp=(4, 5)), np.array([1, 0.5, 0.2, 0], np.float32)),
    Curve(FactorSpec(out=(6, 1), inp=(3, 12), axes=(1, 2)), np.array([1, 0.1, 0], np.float32)),
]


def _same(found: tuple[list[Curve], float] | None) -> bool:
    if found is None:
        return False
    curves, sensitivity = found
    return (
        sensitivity == 0.25
        and [c.spec for c in curves] == [c.spec for c in CURVES]
        and all(np.array_equal(a.errors, b.errors) for a, b in zip(curves, CURVES, strict=True))
        and all(c.errors.dtype == np.float32 for c in curves)
    )


def test_what_was_written_is_read() -> None:
    assert cache.read("key") is None
    cache.write("key", CURVES, 0.25)
    assert _same(cache.read("key"))
    assert cache.read("other") is None
    assert [p.name for p in cache.cache_folder().iterdir()] == ["key.npz"]  # nothing half done
    cache.write("key", [], 1.0)
    assert cache.read("key") == ([], 1.0)


def test_a_damaged_file_is_as_good_as_none() -> None:
    """Every single bit that may be wrong, and every length that a file may be cut to."""
    cache.write("key", CURVES, 0.25)
    path = cache.cache_folder() / "key.npz"
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    damaged = [whole[:length] for length in range(0, len(whole), 37)]
    for place in range(0, len(whole), 3):
        broken = bytearray(whole)
        broken[place] ^= 1 << int(generator.integers(8))
        damaged.append(bytes(broken))
    damaged += [b"", b"nonsense", b"\x93NUMPY" + whole, whole + whole[:50]]
    lost = 0
    for text in damaged:
        path.write_bytes(text)
        found = cache.read("key")
        assert found is None or _same(found)
        lost += found is None
    assert lost > 0.5 * len(damaged)
    path.write_bytes(whole)
    assert _same(cache.read("key"))


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("BP_CONVERT_CACHE", str(blocked))
    cache.write("key", CURVES, 0.25)
    assert cache.read("key") is None
    assert blocked.read_text() == ""


def test_what_was_used_last_is_kept_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    for number, key in enumerate("abcd"):
        cache.write(key, CURVES, 0.25)
        os.utime(cache.cache_folder() / f"{key}.npz", (number, number))
    assert cache.read("a") is not None  # the oldest, and now the one used last
    size = (cache.cache_folder() / "a.npz").stat().st_size
    monkeypatch.setattr(cache, "LIMIT", 2 * size)
    cache._trim.cache_clear()
    cache.write("e", CURVES, 0.25)
    assert sorted(p.name for p in cache.cache_folder().iterdir()) == ["a.npz", "d.npz", "e.npz"]


def test_where_curves_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path / "own"))
    assert cache.cache_folder() == tmp_path / "own" / "curves"
    monkeypatch.delenv("BP_CONVERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "bp-convert" / "curves"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "bp-convert" / "curves"


def test_keys_tell_contents_apart() -> None:
    a = torch.arange(6.0)
    keys = [
        cache.key_of([a], "x"),
        cache.key_of([a], "y"),
        cache.key_of([a], "x", ""),
        cache.key_of([a.view(2, 3)], "x"),
        cache.key_of([a.double()], "x"),
        cache.key_of([a + 1e-6], "x"),
        cache.key_of([a, a], "x"),
        cache.key_of([a[:3], a[3:]], "x"),
        cache.key_of([], "x"),
    ]
    assert len(set(keys)) == len(keys)
    turned = torch.arange(6.0).view(3, 2).t().contiguous().t()
    assert cache.key_of([turned], "x") == cache.key_of([a.view(3, 2)], "x")
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        assert cache.key_of([a.to(dtype)]) == cache.key_of([a.to(dtype)])
    assert cache.key_of([torch.tensor(1.0)]) != cache.key_of([torch.tensor(2.0)])
