"""An episode's outcome in a canary: every turn that was over has its part in it, as in the windows that train."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from controlplane.models import Feedback, Generation
from controlplane.selectors.credit import feedback_credited
from controlplane.selectors.version_outcomes import _said
from controlplane.services.clock import database_now
from controlplane.services.signals import reward_of, signal_map_publish
from controlplane.services.windows import signal_map_current
from controlplane.states import Arm, Consent
from rl_core.store import open_store
from tests.controlplane.lanes.test_canary_outcomes import metric, rows_of, say
from tests.lane_rows import ACTOR
from tests.shipping_rig import GOAL, Users, canary_spec, shipping_world, to_canary

pytestmark = pytest.mark.django_db

METRICS = [
    GOAL,
    metric("thumbs", "signal", key="thumbs", direction="higher"),
    metric("responses", "response_rate", direction="higher"),
]


def experiment(**content):
    """A canary in a project whose map halves an outcome with every turn between."""
    world = shipping_world(canary=canary_spec(metrics=METRICS))
    rules = {"signals": {"thumbs": {"values": {"true": 1.0, "false": 0.0}}}, "episode_discount": 0.5, **content}
    signal_map_publish(project=world.project, content=rules, author=None, actor=ACTOR)
    return world, to_canary(world), Users(world)


def turns(users, count: int, *, key: str = "ann", session: str = "s1") -> list[Generation]:
    """A session's turns, a minute apart, the last one a minute ago."""
    rows = [users.ask(key, session=session) for _ in range(count)]
    for age, row in enumerate(reversed(rows), start=1):
        Generation.objects.filter(id=row.id).update(created_at=database_now() - timedelta(minutes=age))
    return [Generation.objects.get(id=row.id) for row in rows]


def outcome(world, turn: Generation, value: bool, *, at: datetime | None = None, sender: str = "app") -> None:
    """What the receiver stores for an episode: it is joined with the newest turn."""
    row = say(world, turn, value, sender=sender)
    at = at or turn.created_at + timedelta(seconds=1)
    Feedback.objects.filter(id=row.id).update(
        target_kind="episode", target_id=turn.session, occurred_at=at, created_at=at
    )


def found_of(release) -> dict[str, dict[str, tuple[float, int]]]:
    return {name: {row.user: (row.total, row.count) for row in rows} for name, rows in rows_of(release).metrics.items()}


def test_every_turn_of_an_episode_has_its_outcome():
    world, release, users = experiment()
    first, _, last = turns(users, 3)
    outcome(world, last, True)
    say(world, first, False, sender="k")
    found = found_of(release)
    # The first turn: its own thumb down (1 voice) against a quarter of the outcome's, two turns later.
    assert found["reward"] == {first.user_hash: (pytest.approx(0.2 + 1.0 + 1.0), 3)}
    assert found["thumbs"] == {first.user_hash: (pytest.approx(0.5 + 1.0 + 1.0), 3)}
    assert found["responses"] == {first.user_hash: (3.0, 3)}


def test_only_turns_of_that_user_that_were_over_have_a_part_in_it():
    world, release, users = experiment()
    first, second, third = turns(users, 3)
    other = turns(users, 1, key="bob")[0]
    apart = turns(users, 1, key="ann", session="s2")[0]
    outcome(world, third, True, at=second.created_at + timedelta(seconds=1))
    found = found_of(release)
    assert found["reward"] == {first.user_hash: (2.0, 2)}
    assert found["responses"] == {first.user_hash: (2.0, 4), other.user_hash: (0.0, 1)}
    assert apart.user_hash == first.user_hash


def test_an_outcome_that_speaks_of_the_last_turn_alone():
    world, release, users = experiment(episode_discount=0.0)
    rows = turns(users, 3)
    outcome(world, rows[-1], True)
    assert found_of(release)["reward"] == {rows[0].user_hash: (1.0, 1)}


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("silence", [{}, {"silence": "value", "silence_value": -0.25}])
def test_the_canary_is_told_what_the_window_is_told(discount, silence):
    world, release, users = experiment(episode_discount=discount, **silence)
    rows = []
    for number in range(6):
        own = turns(users, 1 + number % 4, key=f"u{number}", session=f"s{number % 3}")
        rows += own
        if number % 3 != 1:
            outcome(world, own[-1], number % 2 == 0, sender=f"app {number % 2}")
        if number % 2:
            say(world, own[0], number % 3 == 0, sender="k")
    content, wanted = signal_map_current(project=world.project), {}
    heard = feedback_credited(generations=rows, until=database_now())
    for row in rows:
        reward = reward_of(content, heard[row.id], generation_at=row.created_at)
        if reward is not None:
            total, count = wanted.get(row.user_hash, (0.0, 0))
            wanted[row.user_hash] = (total + reward, count + 1)
    assert found_of(release)["reward"] == {user: (pytest.approx(total), n) for user, (total, n) in wanted.items()}
    assert len(wanted) >= 4


def test_a_monitor_hears_outcomes_of_episodes_too():
    world, _, _ = experiment()
    rows = [world.generate(open_store("memory:///"), user_key="ann", session="s1", consent=Consent.NONE) for _ in "ab"]
    outcome(world, Generation.objects.get(id=rows[-1].id), True, at=database_now() + timedelta(seconds=1))
    (said,) = _said(world.lane, world.lane.promoted_version, Arm.PROMOTED)
    assert (said.total, said.count) == (2.0, 2)
