"""Each test starts from the same seed, on one thread, and leaves torch as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    # What torch.manual_seed does besides takes longer than most tests: it notes, with the stack,
    # a seed for each kind of device that is not yet in use.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep the tests of a file from the user's cache and from other files'."""
    folder = tmp_path_factory.getbasetemp() / "caches" / request.module.__name__
    monkeypatch.setenv("BP_CONVERT_CACHE", str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
