"""People steer a lane in a real browser: it moves by itself, acts ask for reasons, maps are tried before they count."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Locator, Page, expect

from controlplane.models import Alert, Event, Lane, Release, SignalMap
from controlplane.services.alerts import alert_raise, alert_resolve
from controlplane.services.cadence import cadence_pause, cadence_resume
from controlplane.services.releases import release_end
from controlplane.states import AlertKind
from frontend.templatetags.slipway import until_text
from tests.browser.conftest import Backstage, Watched
from tests.factories import HOSTILE
from tests.lane_rows import ACTOR
from tests.lane_story import Story, empty_lane, lane_story
from tests.shipping_rig import look

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]


def part(page: Page, name: str) -> Locator:
    return page.locator(f"#lane-{name}")


def expect_live(page: Page) -> None:
    expect(page.locator("#live")).to_have_attribute("data-state", "live")


def open_lane(watched: Watched, story: Story, role: str = "owner") -> Page:
    watched.login(story.workspace.people[role].username)
    watched.open(f"/lanes/{story.world.lane.pk}/")
    expect_live(watched.page)
    return watched.page


def test_the_page_moves_with_its_lane(watched: Watched, backstage: Backstage) -> None:
    story: Story = backstage(lambda: lane_story(users=60))
    page = open_lane(watched, story)
    expect(part(page, "status")).to_contain_text("held")
    expect(part(page, "status").locator("li[aria-current=step]")).to_contain_text("Canary 20%")
    users = part(page, "release").locator("tbody tr").filter(has_text="failures").locator("td").first
    before = users.inner_text()

    # Feedback arrives: the next window holds more.
    ready = part(page, "readiness").locator("dd").first
    held = ready.inner_text()
    backstage(lambda: story.answer(30, first=700, seed=6))
    expect(ready).not_to_have_text(held)

    # A look without a new verdict makes no event; the figures come all the same.
    backstage(look)
    expect(users).not_to_have_text(before, timeout=60_000)

    # A person resolves the alert elsewhere: the lane is no longer held, and the badge goes.
    expect(page.locator(".badge")).to_have_text(re.compile("1"))
    alert = backstage(lambda: Alert.objects.get(lane=story.world.lane))
    reviewer = story.workspace.people["reviewer"]
    backstage(lambda: alert_resolve(alert=alert, user=reviewer, actor=ACTOR, reason="looked"))
    expect(part(page, "status")).not_to_contain_text("held")
    expect(page.locator(".badge")).to_have_count(0)

    # The release ends: the strip says so, and its panel goes.
    flying = backstage(lambda: Release.objects.get(lane=story.world.lane, state="canary"))
    backstage(lambda: release_end(release=flying, actor=ACTOR, reason="enough"))
    expect(part(page, "release").locator("section")).to_have_count(0)
    expect(part(page, "status").locator(".strip")).to_contain_text("stopped")


def test_a_cadence_is_paused_from_the_keyboard_with_a_reason(watched: Watched, backstage: Backstage) -> None:
    story: Story = backstage(lambda: empty_lane(cadence=True))
    page = open_lane(watched, story, "engineer")
    page.get_by_role("link", name="Pause").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading", name="Pause: assistant")).to_be_visible()
    expect(dialog).to_contain_text("Users notice nothing")
    expect(dialog.get_by_label("Reason")).to_be_focused()
    page.keyboard.press("Enter")  # without a reason the browser does not send it
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.get_by_role("link", name="Pause").click()
    dialog.get_by_label("Reason").fill("release week")
    page.keyboard.press("Enter")
    expect(part(page, "status")).to_contain_text("no slot opens until somebody resumes it")
    assert backstage(lambda: Lane.objects.get(pk=story.world.lane.pk)).paused_at is not None
    assert backstage(Event.objects.filter(type="lane.changed", reason="release week").exists)

    # Somebody else resumes while the dialog is open: the act is refused on what was seen, and says so.
    page.get_by_role("link", name="Resume").click()
    expect(dialog).to_be_visible()
    backstage(lambda: cadence_resume(lane=story.lane, actor=ACTOR, reason="me first"))
    backstage(lambda: cadence_pause(lane=story.lane, actor=ACTOR, reason="and again"))
    dialog.get_by_label("Reason").fill("it is over")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("read it again")
    watched.forgive("409 (Conflict)")


def test_a_signal_map_is_previewed_then_published(watched: Watched, backstage: Backstage) -> None:
    story: Story = backstage(empty_lane)
    backstage(lambda: story.answer(40, seed=2))
    watched.login(story.workspace.people["reviewer"].username)
    watched.open("/feedback/")
    watched.page.get_by_role("link", name="Signal map").click()
    page = watched.page
    page.get_by_label("thumbs, false").fill("-2")
    page.get_by_role("button", name="Preview on the last day").click()
    expect(page.get_by_role("alert").first).to_contain_text("rewards must lie in [-1, 1]")
    watched.forgive("422 (Unprocessable Entity)")
    page.get_by_label("thumbs, false").fill("-1")
    page.get_by_role("button", name="Preview on the last day").click()
    preview = page.locator("#map-preview")
    expect(preview).to_contain_text("40 answers")
    expect(preview.locator("svg.histogram rect.after")).to_have_count(10)
    preview.get_by_text("Values").click()
    worst = preview.locator("tbody tr").first
    expect(worst.locator("td").nth(0)).to_have_text("0")
    expect(worst.locator("td").nth(1)).not_to_have_text("0")
    page.get_by_role("button", name="Publish").click()
    expect(page.get_by_role("status").filter(has_text="is published")).to_be_visible()
    newest = backstage(lambda: SignalMap.objects.latest("number"))
    assert newest.content["signals"]["thumbs"]["values"]["false"] == -1.0


def test_an_alert_is_resolved_where_it_is_read(watched: Watched, backstage: Backstage) -> None:
    story: Story = backstage(lambda: empty_lane(cadence=True))
    page = watched.page
    watched.login(story.workspace.people["reviewer"].username)
    watched.open("/alerts/")
    expect_live(page)
    expect(page.get_by_role("heading", name="Nothing is open")).to_be_visible()
    detail = {"about": f"refusal {HOSTILE}", "reason": "it rose"}
    backstage(
        lambda: alert_raise(lane=story.lane, kind=AlertKind.BEHAVIOUR, subject="v:refusal", detail=detail, holds=True)
    )
    expect(page.get_by_role("heading", name="1 open")).to_be_visible()
    expect(page.locator(".badge")).to_contain_text("1")
    expect(page.locator("#alerts .ctl").first).to_have_text("ESC")
    page.get_by_role("link", name="Resolve").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("the prompts changed")
    page.get_by_role("dialog").get_by_role("button", name="Resolve").click()
    expect(page.get_by_role("heading", name="Nothing is open")).to_be_visible()
    expect(page.get_by_role("table").last).to_contain_text("the prompts changed")
    expect(page.locator(".badge")).to_have_count(0)
    assert backstage(lambda: Lane.objects.get(pk=story.world.lane.pk)).hold_reason == ""


@pytest.mark.parametrize(
    "watched",
    [{"viewport": {"width": 390, "height": 844}}, {"color_scheme": "dark"}],
    ids=["narrow", "dark"],
    indirect=True,
)
def test_no_page_is_wider_than_its_screen(watched: Watched, backstage: Backstage) -> None:
    story: Story = backstage(lambda: lane_story(hostile=HOSTILE, users=40))
    page = watched.page
    watched.login(story.workspace.owner.username)
    assert story.flying is not None
    lane = f"/lanes/{story.world.lane.pk}/"
    for path in (
        lane,
        f"{lane}cadence/",
        f"{lane}served/",
        f"/releases/{story.flying.pk}/",
        "/lanes/",
        "/feedback/",
        "/feedback/map/",
        "/feedback/sources/",
        "/alerts/",
        "/",
    ):
        watched.open(path)
        wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide, path
        assert page.locator("main script").count() == 0, path
        assert page.locator("main b[onmouseover]").count() == 0, path


def test_countdowns_say_the_same_in_the_browser(watched: Watched, backstage: Backstage) -> None:
    story: Story = backstage(lambda: empty_lane(cadence=True))
    watched.login(story.workspace.owner.username)
    now = datetime(2026, 9, 1, tzinfo=UTC)
    for seconds in (-1, 0, 1, 59, 60, 61, 3599, 3600, 86_399, 86_400, 200_000):
        moment = now + timedelta(seconds=seconds)
        script = "([then, now]) => import('/static/slipway/times.js').then((times) => times.untilText(then, now))"
        shown = watched.page.evaluate(script, [moment.timestamp() * 1000, now.timestamp() * 1000])
        assert shown == until_text(moment, now), seconds
