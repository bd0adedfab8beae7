"""The statistics' promises: a few simulated runs here, the printed numbers of runs in the full tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rl_core.shipping.claims import (
    CLAIMS,
    Claim,
    claim_line,
    peeking_claims,
    persona_claims,
    ratio_claims,
    release_claims,
    returning_claims,
)
from rl_core.shipping.peeking import prefixes
from rl_core.shipping.simulation import CANARY, Traffic, releases


def all_held(claims: Iterator[Claim]) -> list[str]:
    """Run them; the lines of those that did not hold."""
    found = list(claims)
    assert found
    return [claim_line(claim) for claim in found if not claim.held]


def test_false_alarms_of_a_few_streams():
    assert all_held(peeking_claims(runs=100, users=1000)) == []


def test_false_alarms_with_a_few_users_who_return():
    assert all_held(returning_claims(runs=15)) == []


def test_a_few_releases():
    assert all_held(release_claims(runs=3)) == []


def test_the_sample_ratio_of_a_few_streams():
    assert all_held(ratio_claims(runs=50, found_runs=50)) == []


def test_a_few_crowds_of_whom_some_fall_silent():
    assert all_held(persona_claims(runs=60)) == []


def test_a_bound_for_one_look_would_not_hold_for_many():
    rng, crossed = np.random.default_rng(1), 0
    for _ in range(100):
        difference_N, variance_N = prefixes(rng.normal(size=2000), rng.random(2000) < 0.5)
        crossed += bool((np.abs(difference_N[100:]) > 1.96 * np.sqrt(variance_N[100:])).any())
    assert crossed > 20  # where a single look would give about 5


def test_a_candidate_that_is_worse_is_stopped_where_it_was_seen():
    ends = releases(Traffic(quality=-0.4, users=20_000), CANARY, runs=2, seed=0)
    assert ends == {"fail at 1%": 2}


@pytest.mark.drill
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("claims", CLAIMS, ids=lambda claims: claims.__name__)
def test_every_promise_holds_and_is_documented_as_the_command_prints_it(claims):
    page = (Path(__file__).parents[3] / "docs/shipping.md").read_text()
    found = list(claims())
    assert [claim_line(claim) for claim in found if not claim.held] == []
    assert [claim_line(claim) for claim in found if claim_line(claim) not in page] == []
