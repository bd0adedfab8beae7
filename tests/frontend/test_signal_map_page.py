"""The signal map's editor: a preview gives the rewards that a window would, and what is published is what was shown."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.models import Feedback, Generation, SignalDefinition, SignalMap
from controlplane.services.signals import reward_of
from controlplane.services.windows import signal_map_current
from controlplane.states import MemberRole
from tests.factories import make_workspace
from tests.lane_story import Story, empty_lane

pytestmark = pytest.mark.django_db


@pytest.fixture
def story() -> Story:
    story = empty_lane()
    story.answer(40, seed=3)
    return story


def client_of(story: Story, role: MemberRole = MemberRole.REVIEWER) -> Client:
    client = Client()
    client.force_login(story.workspace.people[role.value])
    return client


def post(story: Story, act: str, previewed: str = "", **changes: Any) -> Any:
    """The form as the browser posts it."""
    client = client_of(story)
    form = client.get(reverse("signal_map")).context["form"]
    data: dict[str, Any] = {
        "act": act,
        "previewed": previewed,
        "silence": form.silence,
        "silence_value": form.silence_value,
        "horizon": form.horizon,
        "episode_discount": form.episode_discount,
        **({"weigh_responses": "on"} if form.weigh_responses else {}),
    }
    for row in form.rows:
        slug = row.signal.slug
        data |= {f"{slug}.{cell.name}": cell.text for cell in row.cells} | {f"{slug}.weight": row.weight}
        data |= {f"{slug}.{name}": text for name, text in row.times.items()}
        data |= {f"{slug}.counts": "on"} if row.counts else {}
    return client.post(reverse("signal_map"), {**data, **changes})


def test_the_form_shows_the_map_in_force_and_gives_it_back_unchanged(story: Story) -> None:
    shown = post(story, "preview")
    assert shown.status_code == 200
    assert shown.context["previewed"] == SignalMap.objects.get().content_hash
    assert "this is the map in force" in shown.content.decode()


def test_a_preview_gives_the_rewards_that_a_window_would(story: Story) -> None:
    before = post(story, "preview", **{"thumbs.v_false": "-0.5"}).context["preview"]
    rows = Generation.objects.filter(lane=story.lane)
    content = signal_map_current(project=story.world.project)
    rewards = []
    for row in rows:
        events = Feedback.objects.filter(generation_id=row.id, state="joined").select_related("signal", "source")
        reward = reward_of(content, events, generation_at=row.created_at)
        rewards += [reward] if reward is not None else []
    assert before.answers == rows.count() == 40
    assert before.before.rewarded == len(rewards) < 40
    assert before.before.mean == pytest.approx(sum(rewards) / len(rewards))
    liked = sum(reward == 1.0 for reward in rewards)
    assert before.after.bins == [0, 0, len(rewards) - liked, 0, 0, 0, 0, 0, 0, liked]
    assert before.before.bins == [0, 0, 0, 0, 0, len(rewards) - liked, 0, 0, 0, liked]


def test_silence_with_a_value_rewards_every_answer(story: Story) -> None:
    shown = post(story, "preview", silence="value", silence_value="-0.1").context["preview"]
    assert shown.share_after == 1.0
    assert shown.share_before < 1.0


def test_what_is_published_is_what_was_previewed(story: Story) -> None:
    change = {"thumbs.v_false": "-0.25", "horizon": "2 h"}
    unseen = post(story, "publish", **change)
    assert SignalMap.objects.count() == 1
    assert "changed since the preview" in unseen.content.decode()
    seen = post(story, "preview", **change).context["previewed"]
    other = post(story, "publish", previewed=seen, **{**change, "horizon": "3 h"})
    assert other.status_code == 200
    assert SignalMap.objects.count() == 1
    done = post(story, "publish", previewed=seen, **change)
    assert done.headers["Location"] == reverse("signal_map")
    published = SignalMap.objects.latest("number")
    assert published.number == 2
    assert published.author == story.workspace.people["reviewer"]
    assert published.content["signals"]["thumbs"]["values"] == {"true": 1.0, "false": -0.25}
    assert published.content["horizon_s"] == 7200
    assert published.content_hash == seen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thumbs.v_true": "2"}, "rewards must lie in [-1, 1]"),
        ({"thumbs.v_true": "much"}, "true: 'much' is not a number"),
        ({"thumbs.v_true": "", "thumbs.v_false": ""}, "give at least one of its values a reward"),
        ({"thumbs.weight": "0"}, "weight must be in (0, 1000]"),
        ({"thumbs.delay_s": "later"}, "delay: give a duration"),
        ({"thumbs.delay_s": "2 h", "horizon": "1 h"}, "the horizon must be over delay_s of thumbs"),
        ({"thumbs.counts": ""}, "Let at least one signal count"),
        ({"silence_value": "3"}, "silence_value must lie in [-1, 1]"),
        ({"episode_discount": "x"}, "Give a number"),
        ({"horizon": "soon"}, "Give a duration"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_shown(story: Story, change: dict[str, str], message: str) -> None:
    answer = post(story, "preview", **change)
    assert answer.status_code == 422
    assert message in html.unescape(answer.content.decode())
    assert "preview" not in answer.context


def test_signals_of_every_type_are_defined_and_mapped(story: Story) -> None:
    client = client_of(story)

    def define(**data: str) -> Any:
        return client.post(reverse("signal_add"), {"act": "one", **data})

    assert define(slug="score", value_type="number", minimum="0", maximum="10").status_code == 302
    assert define(slug="mood", value_type="category", categories="good, bad").status_code == 302
    assert SignalDefinition.objects.get(slug="mood").categories == ["good", "bad"]
    for wrong, message in (
        ({"slug": "score", "value_type": "boolean"}, "There is a signal of this name already"),
        ({"slug": "range", "value_type": "number", "minimum": "3", "maximum": "1"}, "needs minimum &lt; maximum"),
        ({"slug": "a b", "value_type": "boolean"}, "Give a name of letters"),
    ):
        answer = define(**wrong)
        assert answer.status_code == 422
        assert message in answer.content.decode(), wrong
    counted = {"score.counts": "on", "score.low": "-1", "score.high": "1", "mood.counts": "on", "mood.v_good": "0.5"}
    seen = post(story, "preview", **counted)
    assert seen.status_code == 200, re.sub(r"<[^>]+>", " ", seen.content.decode())[-2000:]
    post(story, "publish", previewed=seen.context["previewed"], **counted)
    signals = SignalMap.objects.latest("number").content["signals"]
    assert (signals["score"]["low"], signals["score"]["high"]) == (-1.0, 1.0)
    assert signals["mood"]["values"] == {"good": 0.5}
    client.post(reverse("signal_add"), {"act": "detected"})
    assert SignalDefinition.objects.filter(slug="edit_persisted").exists()


def test_an_older_version_can_be_looked_at(story: Story) -> None:
    change = {"thumbs.v_false": "-1"}
    post(story, "publish", previewed=post(story, "preview", **change).context["previewed"], **change)
    client = client_of(story)
    assert client.get(reverse("signal_map")).context["form"].rows[0].cells[1].text == "-1"
    assert client.get(reverse("signal_map") + "?version=1").context["form"].rows[0].cells[1].text == "0"


def test_a_project_without_signals_is_told_how_to_begin() -> None:
    workspace = make_workspace()
    client = Client()
    client.force_login(workspace.owner)
    body = client.get(reverse("signal_map")).content.decode()
    assert "No signal yet" in body
    assert f"/api/v1/projects/{workspace.project.slug}/signals" in body
    assert 'id="signal-map"' not in body
