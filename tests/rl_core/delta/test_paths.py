"""Paths over skip-deltas: whatever moves least, and offers that are of no use cost nothing."""

import pytest
from weightpairs import Lineage, replace, same_bits

from rl_core.delta import Base, HopKind, Target, plan_path, publish_delta, reconcile
from rl_core.types import VersionRef


def skip(lineage: Lineage, start: int, end: int) -> str:
    """A delta from version 0-start to 0-end, as a publisher makes it beside the chain."""
    base = lineage.published[start]
    return publish_delta(
        lineage.store,
        old=lineage.weights[start],
        new=lineage.weights[end],
        version=VersionRef("lin", 0, end),
        base=Base(f"lin:0-{start}", base.root, base.manifest_key),
        fence=1000 + start,
    ).manifest_key


def target(lineage: Lineage, number: int, *deltas: str, snapshot: str | None = None) -> Target:
    plain = lineage.target(number, snapshot=snapshot)
    return Target(
        version=plain.version, root=plain.root, manifest=plain.manifest, snapshot=plain.snapshot, deltas=deltas
    )


def spans(hops):
    return [(hop.kind, hop.leads_to.version) for hop in hops]


@pytest.fixture(scope="module")
def lineage(tmp_path_factory):
    return Lineage(tmp_path_factory.mktemp("chain"), versions=10)


def test_a_skip_delta_is_taken_where_it_is_smaller(lineage):
    key = skip(lineage, 0, 8)
    shadow = lineage.shadow(0)
    result = reconcile(lineage.store, shadow, target(lineage, 10, key))
    assert spans(result.hops) == [
        (HopKind.FORWARD, "lin:0-8"),
        (HopKind.FORWARD, "lin:0-9"),
        (HopKind.FORWARD, "lin:0-10"),
    ]
    assert same_bits(shadow.tensors, lineage.weights[10])
    assert shadow.manifest_key == lineage.published[10].manifest_key
    whole = sum(hop.bytes for hop in plan_path(lineage.store, lineage.shadow(0), lineage.target(10)))
    assert result.bytes_fetched < whole


def test_a_skip_delta_is_reached_over_single_steps(lineage):
    """From 1 the way to the skip from 2 is one step forwards; from 3 one step back."""
    key = skip(lineage, 2, 9)
    near = plan_path(lineage.store, lineage.shadow(1), target(lineage, 9, key))
    assert spans(near) == [(HopKind.FORWARD, "lin:0-2"), (HopKind.FORWARD, "lin:0-9")]
    over = lineage.shadow(3)
    result = reconcile(lineage.store, over, target(lineage, 9, key))
    assert spans(result.hops) == [(HopKind.BACKWARD, "lin:0-2"), (HopKind.FORWARD, "lin:0-9")]
    assert same_bits(over.tensors, lineage.weights[9])


def test_a_skip_delta_is_taken_back(lineage):
    key = skip(lineage, 4, 10)
    shadow = lineage.shadow(10)
    result = reconcile(lineage.store, shadow, target(lineage, 4, key))
    assert spans(result.hops) == [(HopKind.BACKWARD, "lin:0-4")]
    assert same_bits(shadow.tensors, lineage.weights[4])


def test_where_the_chain_broke_off_the_skip_delta_leads_on(location):
    lineage = Lineage(location, versions=6)
    key = skip(lineage, 0, 5)
    replace(lineage.store, lineage.published[3].manifest_key, b"damaged")
    shadow = lineage.shadow(0)
    with pytest.raises(ValueError, match="not a manifest"):
        reconcile(lineage.store, shadow, lineage.target(6))
    reconcile(lineage.store, shadow, target(lineage, 6, key))
    assert same_bits(shadow.tensors, lineage.weights[6])


def test_offers_that_are_of_no_use_cost_nothing(lineage):
    """Gone, damaged, or no key at all: the chain leads there still."""
    lineage.store.put("offers/damaged", b"{}")
    offers = ("offers/gone", "offers/damaged", "../../etc/passwd")
    hops = plan_path(lineage.store, lineage.shadow(7), target(lineage, 9, *offers))
    assert spans(hops) == [(HopKind.FORWARD, "lin:0-8"), (HopKind.FORWARD, "lin:0-9")]


def test_one_step_reads_no_offers(lineage, monkeypatch):
    read = []
    get = lineage.store.get
    monkeypatch.setattr(lineage.store, "get", lambda key: read.append(key) or get(key))
    plan_path(lineage.store, lineage.shadow(7), target(lineage, 8, "offers/gone", snapshot="offers/none"))
    assert read == [lineage.published[8].manifest_key]
