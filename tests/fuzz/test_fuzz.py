"""Random architectures: exact at full rank or refused, never a crash, never another function.

``BP_CONVERT_FUZZ=2000`` tries that many, where slow tests run. A failing example is shown as
``check(seed=...)``; ``python -m tests.fuzz.check SEED`` shows the architecture.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.zoo.compare import state_of
from tests.fuzz.check import check
from tests.fuzz.grammar import case

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = int(os.environ.get("BP_CONVERT_FUZZ", "40"))
LARGEST = 10**6


@pytest.mark.parametrize("examples", [8, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
def test_converted_exactly_or_refused(examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, LARGEST))
    def all_are(seed: int) -> None:
        assert check(seed).partition(":")[0] in ("converted", "kept", "refused")

    all_are()


def test_a_seed_is_one_architecture() -> None:
    for seed in range(12):
        one, two = case(seed), case(seed)
        assert state_of(one.model) == state_of(two.model)
        assert torch.equal(one.x, two.x)
        assert one.inputs == two.inputs


def test_most_architectures_run_in_both_modes() -> None:
    for seed in range(40):
        made = case(seed)
        for training in (False, True):
            made.model.train(training)
            _ = made.model(x=made.x) if made.keyword else made.model(made.x)
