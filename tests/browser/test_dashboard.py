"""People at work in a real browser: start a run, watch it move, look into it, pause and resume."""

from __future__ import annotations

import random
import re

import pytest
from playwright.sync_api import Locator, Page, expect

from controlplane.models import Event, Run
from controlplane.states import RunState
from tests.browser.conftest import Backstage, Watched
from tests.factories import HOSTILE, Workspace
from tests.playing import begin_run, evaluate, kill_unit, play, play_step, start_run

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]


def chart(page: Page, key: str) -> Locator:
    return page.locator(f'[data-chart="{key}"]')


def points(page: Page, key: str) -> int:
    return int(chart(page, key).get_attribute("data-points") or 0)


def expect_live(page: Page) -> None:
    expect(page.locator("#live")).to_have_attribute("data-state", "live")


def test_start_a_run_watch_it_open_a_trajectory_pause_and_resume(
    watched: Watched, workspace: Workspace, backstage: Backstage
) -> None:
    page = watched.page
    watched.login(workspace.people["engineer"].username)
    page.get_by_role("link", name="New run").first.click()
    page.get_by_label("Name").fill("From the browser")
    page.get_by_label("Steps", exact=True).fill("0")
    page.get_by_label("Prompts a step").fill("2")
    page.get_by_label("Group size").fill("4")
    page.get_by_label("Held-out tasks").fill("3")
    page.locator("form#run-form").evaluate("form => { form.noValidate = true }")
    page.get_by_role("button", name="Start the run").click()
    expect(page.get_by_text("steps must be at least 1")).to_be_visible()
    watched.forgive("422 (Unprocessable Entity)")
    page.get_by_label("Steps", exact=True).fill("6")
    page.get_by_role("button", name="Start the run").click()
    page.wait_for_url(re.compile(r"/runs/[0-9a-f-]{36}/$"))

    run = backstage(lambda: Run.objects.select_related("project", "lineage").get(name="From the browser"))
    expect(page.locator("#run-status")).to_contain_text("pending")
    expect_live(page)
    backstage(lambda: begin_run(run))
    expect(page.locator("#run-status")).to_contain_text("running")
    luck = random.Random(4)
    backstage(lambda: evaluate(run, step_number=0, skill=0.2, luck=luck))
    backstage(lambda: play_step(run, skill=0.3, luck=luck))
    expect(chart(page, "reward")).to_have_attribute("data-points", "2")
    backstage(lambda: play_step(run, skill=0.9, luck=luck))
    expect(chart(page, "reward")).to_have_attribute("data-points", "3")
    expect(page.locator("#run-step")).to_have_text("2")
    expect(chart(page, "reward").locator(".js-plotly-plot .scatterlayer .trace")).to_have_count(2)
    reward = backstage(lambda: run.metric_points.get(name="reward_mean", step=2).value)
    chart(page, "reward").get_by_text("Values").click()
    expect(chart(page, "reward").locator("tbody tr").first.locator("td").first).to_have_text("2")
    shown = chart(page, "reward").locator("tbody tr").first.locator("td").nth(1).text_content()
    assert float(shown or "nan") == pytest.approx(reward, abs=0.005)

    page.get_by_role("link", name="Pause").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("looking at step 2")
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.locator("#run-status")).to_contain_text("paused")
    backstage(run.refresh_from_db)
    assert (run.state, run.state_reason) == (RunState.PAUSED, "looking at step 2")
    page.get_by_role("link", name="Resume").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("it is fine")
    page.keyboard.press("Enter")
    expect(page.locator("#run-status")).to_contain_text("running")
    assert backstage(Event.objects.filter(type="run.changed", reason="it is fine").exists)

    page.get_by_role("link", name="Rollouts").nth(1).click()
    page.locator("tbody th a").first.click()
    expect(page.get_by_role("heading", name="Messages")).to_be_visible()
    page.wait_for_load_state("load")
    token = page.locator("[data-tokens] .tok.on").first
    token.hover()
    expect(page.locator(".token-detail")).to_contain_text("logprob")
    page.locator("[data-tokens]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tok.picked")).to_have_count(1)


def test_hostile_text_is_text(watched: Watched, workspace: Workspace, backstage: Backstage) -> None:
    page = watched.page
    page.on("dialog", lambda dialog: watched.complaints.append(f"a dialog opened: {dialog.message}"))
    run = backstage(lambda: play(start_run(workspace, name="Run " + HOSTILE, steps=2), 1, hostile=HOSTILE))
    backstage(lambda: kill_unit(run, error=HOSTILE))
    watched.login(workspace.owner.username)
    rollout = backstage(lambda: run.groups.filter(step__number=1).first().rollouts.first())
    for path in ("/", "/runs/", f"/runs/{run.pk}/", f"/rollouts/{rollout.pk}/", "/events/", "/work/", "/rollouts/"):
        watched.open(path)
        assert page.locator("main script").count() == 0, path
        assert page.locator("main b[onmouseover]").count() == 0, path
        assert "\u202e" not in page.locator("main").inner_text().replace(HOSTILE, ""), path
    watched.open(f"/rollouts/{rollout.pk}/")
    expect(page.locator(".tree .ctl").first).to_have_text("ESC")


def test_pausing_the_stream_holds_the_page_still_and_resuming_catches_up(
    watched: Watched, workspace: Workspace, backstage: Backstage
) -> None:
    page = watched.page
    run = backstage(lambda: start_run(workspace, steps=6))
    luck = random.Random(3)
    backstage(lambda: play_step(run, skill=0.3, luck=luck))
    watched.login(workspace.owner.username)
    watched.open(f"/runs/{run.pk}/")
    expect_live(page)
    expect(chart(page, "staleness")).to_have_attribute("data-points", "2")
    page.locator("#live-toggle").click()
    expect(page.locator("#live-label")).to_have_text("Paused")
    backstage(lambda: play_step(run, skill=0.6, luck=luck))
    page.wait_for_timeout(2500)
    assert points(page, "staleness") == 2
    expect(page.locator("#run-step")).to_have_text("1")
    page.locator("#live-toggle").click()
    expect(chart(page, "staleness")).to_have_attribute("data-points", "4")
    expect(page.locator("#run-step")).to_have_text("2")


def test_a_lost_connection_comes_back_without_a_gap(
    watched: Watched, workspace: Workspace, backstage: Backstage
) -> None:
    page = watched.page
    run = backstage(lambda: start_run(workspace, steps=6))
    watched.login(workspace.owner.username)
    watched.open(f"/runs/{run.pk}/")
    expect_live(page)
    page.context.set_offline(True)
    page.evaluate("import('/static/slipway/app.js').then((app) => app.live.socket.close())")
    expect(page.locator("#live")).to_have_attribute("data-state", "offline")
    backstage(lambda: play_step(run, skill=0.5, luck=random.Random(1)))
    page.context.set_offline(False)
    expect_live(page)
    expect(chart(page, "reward")).to_have_attribute("data-points", "1")
    watched.forgive("ERR_INTERNET_DISCONNECTED")


def test_the_keyboard_is_enough_and_shortcuts_have_a_switch(
    watched: Watched, workspace: Workspace, backstage: Backstage
) -> None:
    page = watched.page
    watched.login(workspace.owner.username)
    expect_live(page)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#main"
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url("**/runs/")
    page.keyboard.press("/")
    expect(page.get_by_label("Name")).to_be_focused()
    page.get_by_label("Name").type("gc?")
    assert page.url.endswith("/runs/")
    expect_live(page)
    page.locator("main").click(position={"x": 5, "y": 5})
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("Shortcuts are on").uncheck()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_timeout(500)
    assert page.url.endswith("/runs/")


def test_theme_is_remembered_and_narrow_pages_do_not_overflow(
    watched: Watched, workspace: Workspace, backstage: Backstage
) -> None:
    page = watched.page
    run = backstage(lambda: play(start_run(workspace, steps=2), 1))
    watched.login(workspace.owner.username)
    page.locator("#theme-toggle").click()
    page.locator("#theme-toggle").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.set_viewport_size({"width": 400, "height": 800})
    rollout = backstage(lambda: run.groups.filter(step__number=1).first().rollouts.first())
    rubric = "/rubrics/word-problems/"
    paths = ["/", "/runs/", "/runs/new/", f"/runs/{run.pk}/", f"/rollouts/{rollout.pk}/", "/rollouts/", "/clusters/"]
    for path in [*paths, "/task-sets/", rubric, rubric + "edit/", "/events/", "/work/?state=", "/members/", "/keys/"]:
        watched.open(path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_a_rubric_shows_shares_while_it_is_typed(watched: Watched, workspace: Workspace, backstage: Backstage) -> None:
    page = watched.page
    watched.login(workspace.people["reviewer"].username)
    watched.open("/rubrics/word-problems/edit/")
    expect(page.locator(".share")).to_have_text(["20 %", "30 %", "50 %"])
    page.get_by_label("Weight", exact=True).nth(2).fill("1.5")
    expect(page.locator(".share")).to_have_text(["10 %", "15 %", "75 %"])
    page.get_by_role("button", name="Add a criterion").click()
    page.get_by_label("Key", exact=True).nth(3).fill("watched")
    page.get_by_label("Weight", exact=True).nth(3).fill("0")
    page.get_by_label("What is asked").nth(3).fill("Only watched")
    page.get_by_role("button", name="Publish").click()
    expect(page.get_by_text("version 2 is published")).to_be_visible()
    expect(page.get_by_role("row", name="watched")).to_contain_text("0 %")
