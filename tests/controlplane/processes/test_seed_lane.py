"""The demonstration's lane: seeded once, with keys that are kept and mean something."""

import stat

import pytest

from controlplane.models import ApiKey, CadenceSlot, FeedbackSource, SignalDefinition, SignalMap
from controlplane.processes.seed_lane import LANE, SOURCE, lane_access, lane_cadence, seed_lane, signal_map
from controlplane.services.signals import signal_map_publish
from controlplane.services.slots import slots_advance
from controlplane.services.tenancy import api_key_authenticate
from rl_core.environments import short_replies
from rl_core.types import Split
from tests.lane_rows import ACTOR, lane_world

pytestmark = pytest.mark.django_db


@pytest.fixture
def bare(settings, tmp_path):
    """A project with a serving cluster and no lane."""
    settings.STATE_DIR = tmp_path
    world = lane_world()
    world.lane.delete()
    SignalMap.objects.filter(project=world.project).delete()
    return world


def seed(world):
    return seed_lane(project=world.project, serving=world.cluster, model=world.model)


def test_a_lane_with_its_signals_and_a_cadence_by_hand(bare):
    lane = seed(bare)
    assert (lane.slug, lane.system_prompt) == (LANE, short_replies.SYSTEM)
    slugs = set(SignalDefinition.objects.filter(project=bare.project).values_list("slug", flat=True))
    assert slugs == {"thumbs", "dissatisfied_followup", "edit_persisted"}
    assert lane.cadence["interval_s"] == 0.0
    assert slots_advance(lane=lane) is None
    assert not CadenceSlot.objects.exists()


def test_seeding_again_changes_nothing(bare):
    lane = seed(bare)
    signal_map_publish(project=bare.project, content=signal_map(inverted=True), author=None, actor=ACTOR)
    again = seed(bare)
    assert (again.pk, again.revision) == (lane.pk, lane.revision)
    assert SignalMap.objects.filter(project=bare.project).count() == 2


def test_the_keys_of_last_time_are_kept_for_us_alone(bare, tmp_path):
    first = lane_access(bare.project)
    assert lane_access(bare.project) == first
    assert api_key_authenticate(token=first.gateway_key).project_id == bare.project.pk
    assert FeedbackSource.objects.get(project=bare.project).slug == SOURCE
    assert stat.S_IMODE((tmp_path / "demo_lane.json").stat().st_mode) == 0o600
    ApiKey.objects.all().delete()
    second = lane_access(bare.project)
    assert second.gateway_key != first.gateway_key
    assert second.source_secret == first.source_secret
    (tmp_path / "demo_lane.json").unlink()
    assert lane_access(bare.project).source_secret != first.source_secret


def test_the_inverted_map_turns_every_reward_over():
    right, wrong = signal_map()["signals"], signal_map(inverted=True)["signals"]
    assert right.keys() == wrong.keys()
    for slug, rule in right.items():
        assert {name: 1.0 - reward for name, reward in rule["values"].items()} == wrong[slug]["values"]


def test_the_cadence_asks_for_what_the_environment_has():
    cadence = lane_cadence(interval_s=10)
    heldout = short_replies.build_task_set().split(Split.HELDOUT)
    assert cadence["gate"]["tasks"] == cadence["stage"]["eval_tasks"] == len(heldout)
