"""Ways to weights: the cheapest, and what has to be kept for them."""

import itertools
import uuid

from hypothesis import given
from hypothesis import strategies as st

from controlplane.selectors.weight_paths import NOTHING, Edge, kept_edges, reach


def edge(root, base=NOTHING, size=1):
    return Edge(uuid.uuid4(), root, base, size)


def cost_by_hand(edges, root, seen=frozenset()):
    """The cheapest way to a root by trying every one."""
    if root == NOTHING:
        return 0
    ways = [
        way.bytes + cost
        for way in edges
        if way.root == root and way.base_root not in seen | {root}
        if (cost := cost_by_hand(edges, way.base_root, seen | {root})) is not None
    ]
    return min(ways, default=None)


roots = st.sampled_from("abcdef")
graphs = st.lists(st.builds(edge, roots, roots | st.just(NOTHING), st.integers(1, 9)), max_size=12)


@given(graphs)
def test_the_way_found_is_the_cheapest_there_is(edges):
    reached = reach(edges)
    for root in "abcdef":
        expected = cost_by_hand(edges, root)
        assert (root in reached.last) == (expected is not None)
        if expected is not None:
            path = reached.path(root)
            assert [path[0].base_root, path[-1].root] == [NOTHING, root]
            assert all(before.root == after.base_root for before, after in itertools.pairwise(path))
            assert sum(way.bytes for way in path) == expected


@given(graphs, st.sets(roots))
def test_what_is_kept_reaches_as_before_and_nothing_idle_is_kept(edges, needed):
    kept, lost = kept_edges(edges, needed=needed)
    left = [way for way in edges if way.publication in kept]
    for root in needed:
        assert cost_by_hand(left, root) == cost_by_hand(edges, root)
        assert (root in lost) == (cost_by_hand(edges, root) is None)
    on_a_way = {way.publication for root in needed - lost for way in reach(edges).path(root)}
    assert all(way.publication in on_a_way or {way.root, way.base_root} <= needed for way in left)


def test_versions_between_are_let_go_once_a_skip_leads_over_them():
    chain = [edge("0", size=100)] + [edge(str(n), str(n - 1), 10) for n in range(1, 9)]
    skip = edge("8", "0", 30)
    kept, lost = kept_edges([*chain, skip], needed={"8"})
    assert (kept, lost) == ({chain[0].publication, skip.publication}, set())
    kept, _ = kept_edges([*chain, skip], needed={"8", "7"})
    assert kept == {way.publication for way in [*chain, skip]}
