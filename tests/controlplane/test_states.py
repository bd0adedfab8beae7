"""Every pair of states of every life cycle: legal ones are applied once, all others are refused."""

from itertools import product

import pytest
from django.db.models import TextChoices

from controlplane.errors import Conflict, IllegalTransition
from controlplane.services.transitions import sources_of, transition
from controlplane.states import TRANSITIONS, VersionState
from tests.domain_factories import make_row

KINDS = pytest.mark.parametrize("kind", list(TRANSITIONS), ids=lambda kind: kind.__name__)


def test_every_state_has_a_row_in_its_table():
    for kind, table in TRANSITIONS.items():
        assert set(table) == set(kind)
        assert all(target in kind for targets in table.values() for target in targets)


def test_every_state_but_the_first_can_be_entered():
    for kind, table in TRANSITIONS.items():
        first = next(iter(kind))
        entered = {target for targets in table.values() for target in targets}
        assert entered | {first} >= set(kind), kind


def test_sources_of_is_the_table_read_backwards():
    for kind, table in TRANSITIONS.items():
        for target in kind:
            assert sources_of(target) == [source.value for source in table if target in table[source]]


@pytest.mark.django_db
@KINDS
def test_a_change_is_applied_exactly_when_its_table_has_it(kind: type[TextChoices]):
    row = make_row(kind, next(iter(kind)))
    rows = type(row)._default_manager.filter(pk=row.pk)
    for source, target in product(kind, kind):
        rows.update(state=source, **_whole(source))
        seen = rows.get()
        if target in TRANSITIONS[kind][source]:
            transition(seen, to=target, **_whole(target))
            assert rows.get().state == target, (source, target)
        else:
            with pytest.raises(IllegalTransition):
                transition(seen, to=target)
            assert rows.get().state == source, (source, target)


@pytest.mark.django_db
@KINDS
def test_of_two_who_saw_the_same_state_one_is_refused(kind: type[TextChoices]):
    source = next(state for state in kind if TRANSITIONS[kind][state])
    target = sorted(TRANSITIONS[kind][source])[0]
    first = make_row(kind, source)
    second = type(first)._default_manager.get(pk=first.pk)
    transition(first, to=target, **_whole(target))
    with pytest.raises(Conflict):
        transition(second, to=target, **_whole(target))


def _whole(target: TextChoices) -> dict[str, object]:
    """What the database asks of a row in that state."""
    from django.utils.timezone import now

    if target is VersionState.COMMITTED:
        return {"root": "r" * 64, "manifest_key": "m", "committed_at": now()}
    return {}
