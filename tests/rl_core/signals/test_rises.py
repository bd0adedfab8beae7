"""The permutation test finds rises of clusters, and holds its level where attempts of a cluster are alike."""

import random

import pytest

from rl_core.signals.rises import rise


def test_shares_and_the_smallest_p():
    found = rise([(0.0, 8)] * 40, [(8.0, 8)] * 12, draws=999)
    assert (found.before, found.now, found.by, found.p) == (0.0, 1.0, 1.0, 1 / 1000)


def test_a_fall_or_nothing_is_no_rise():
    assert rise([(4.0, 8)] * 9, [(1.0, 8)] * 9).p == 1.0
    assert rise([(4.0, 8)] * 9, [(4.0, 8)] * 9).p == 1.0
    assert rise([(0.0, 0)], [(1.0, 8)]) is None
    assert rise([(0.0, 8)] * 40, [(4.0, 8)] * 12, least=0.51).p == 1.0
    assert rise([(0.0, 8)] * 40, [(4.0, 8)] * 12, least=0.5, draws=999).p == 1 / 1000
    assert rise([(1.0, 8)], []) is None


def test_four_clusters_are_dealt_in_all_ways():
    # the one deal of six that is as large as what was seen
    assert rise([(0.0, 1), (0.0, 1)], [(1.0, 1), (1.0, 1)], draws=3000).p == pytest.approx(1 / 6, abs=0.02)


@pytest.mark.parametrize("alike", [False, True])
def test_it_holds_its_level_whether_or_not_attempts_of_a_cluster_are_alike(alike):
    luck = random.Random(5)

    def cell():
        total = 8.0 * (luck.random() < 0.2) if alike else float(sum(luck.random() < 0.2 for _ in range(8)))
        return total, 8

    ps = [rise([cell() for _ in range(40)], [cell() for _ in range(15)], draws=199).p for _ in range(300)]
    assert sum(p <= 0.05 for p in ps) / len(ps) < 0.08


def test_a_rise_is_found():
    luck = random.Random(2)
    before = [(float(sum(luck.random() < 0.05 for _ in range(8))), 8) for _ in range(60)]
    now = [(float(sum(luck.random() < 0.2 for _ in range(8))), 8) for _ in range(25)]
    assert rise(before, now).p < 1e-3
