"""The clusters page at work: a transfer moves while one looks, an act asks for its reason, the keyboard is enough."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
from playwright.sync_api import expect

from controlplane.models import Event, Export, Replica
from controlplane.services.blobs import blob_put
from controlplane.services.exports import WrittenFile, export_done
from controlplane.services.transfers import TransferReport, transfer_done
from controlplane.states import EventType, WorkKind
from frontend.looks import version_name
from rl_core.store import open_store
from tests.browser.conftest import Backstage, Watched
from tests.factories import Workspace
from tests.fleet_story import FleetStory, fleet_story, tell_progress
from tests.playing import claim_of

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def story(workspace: Workspace, backstage: Backstage) -> FleetStory:
    made: FleetStory = backstage(lambda: fleet_story(steps=6, workspace=workspace))
    return made


def test_a_transfer_moves_while_one_looks(watched: Watched, story: FleetStory, backstage: Backstage) -> None:
    page = watched.page
    watched.login(story.workspace.people["viewer"].username)
    watched.open("/clusters/")
    moving = page.locator(f"#moving-{story.moving.pk}")
    expect(moving).to_contain_text("40 %: 19.2 MB of 48 MB")
    expect(moving).to_contain_text("9.0 s left")
    backstage(lambda: tell_progress(story.moving, share=0.75, phase="decode"))
    expect(moving).to_contain_text("75 %: 36 MB of 48 MB")
    expect(moving).to_contain_text("decode")
    expect(moving.get_by_role("progressbar")).to_have_attribute("value", "0.7500")
    expect(page.locator(f"#replica-{story.moving.replica_id}")).to_contain_text("6 versions")

    report = TransferReport(
        root=story.moving.version.root,
        fetched_bytes=48_000_000,
        hops=6,
        timings={"fetch_s": 9.0, "decode_s": 0.4, "pause_s": 0.021},
    )
    backstage(lambda: transfer_done(story.claim, report=report))
    expect(moving).to_have_count(0)
    expect(page.locator(f"#replica-{story.moving.replica_id}")).to_contain_text("in step")
    expect(page.locator(f"#replica-{story.moving.replica_id}")).to_contain_text("21 ms")
    expect(page.get_by_role("link", name=re.compile("Drain"))).to_have_count(0)


def test_a_replica_is_drained_with_a_reason_and_comes_back(
    watched: Watched, story: FleetStory, backstage: Backstage
) -> None:
    page = watched.page
    watched.login(story.workspace.people["engineer"].username)
    watched.open("/clusters/")
    expect(page.locator("#live")).to_have_attribute("data-state", "live")
    page.get_by_role("link", name="Drain serving-eu/engine-2").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading", name="Drain serving-eu/engine-2")).to_be_visible()
    expect(dialog).to_contain_text("1 other replica of the cluster answers")
    expect(dialog.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("a disk is slow")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="serving-eu/engine-2 is taken out")).to_be_visible()
    replica = backstage(lambda: Replica.objects.get(cluster=story.serving, name="engine-2"))
    assert replica.drained_reason == "a disk is slow"
    row = page.locator(f"#replica-{replica.pk}")
    expect(row).to_contain_text("draining")
    expect(row).to_contain_text("a disk is slow")
    event = backstage(lambda: Event.objects.filter(type=EventType.REPLICA_STEERED).latest("pk"))
    assert (event.reason, event.actor) == ("a disk is slow", story.workspace.people["engineer"].username)

    page.get_by_role("link", name="Undrain serving-eu/engine-2").click()
    dialog.get_by_label("Reason").fill("the disk is new")
    dialog.get_by_role("button", name="Undrain").click()
    expect(row).to_contain_text("ready")

    page.get_by_role("link", name="Pin serving-eu/engine-2").click()
    dialog.get_by_label("Version").select_option(index=2)
    dialog.get_by_label("Reason").fill("to compare")
    dialog.get_by_role("button", name="Pin").click()
    expect(row).to_contain_text("pinned")


def test_the_page_fits_a_phone_and_names_what_it_draws(watched: Watched, story: FleetStory) -> None:
    page = watched.page
    watched.login(story.workspace.owner.username)
    page.set_viewport_size({"width": 400, "height": 800})
    version = f"/versions/{story.moving.version_id}/"
    paths = ("/clusters/", f"/clusters/{story.serving.pk}/lending/", f"/clusters/{story.serving.pk}/settings/", version)
    for path in paths:
        watched.open(path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    watched.open("/clusters/")
    expect(page.locator("#fleet-planner")).to_contain_text("To keep the trainer busy")
    drawing = page.locator("svg.chain").first
    assert "rollout-tokyo holds 0-0, 0-6" in (drawing.get_attribute("aria-label") or "")
    box, newest = page.locator(".chain-box").first.bounding_box(), drawing.bounding_box()
    assert box is not None
    assert newest is not None
    assert newest["x"] + newest["width"] <= box["x"] + box["width"] + 1  # scrolled to the newest version
    unnamed = page.evaluate(
        "[...document.querySelectorAll('main input, main select, main textarea, main progress')]"
        ".filter(e => !e.labels?.length && !e.getAttribute('aria-label')).length"
    )
    assert unnamed == 0


def test_a_version_is_exported_and_downloaded(
    watched: Watched, story: FleetStory, backstage: Backstage, settings: Any
) -> None:
    page = watched.page
    watched.login(story.workspace.people["engineer"].username)
    watched.open("/clusters/")
    page.locator(f"#replica-{story.moving.replica_id}").get_by_role("link", name=version_name(story.head)).click()
    expect(page.get_by_role("heading", name=f"Version 0-{story.head.number}")).to_be_visible()
    expect(page.locator("#live")).to_have_attribute("data-state", "live")
    page.get_by_role("link", name="Export", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Format").select_option("bf16")
    dialog.get_by_label("Reason").fill("for the edge fleet")
    dialog.get_by_role("button", name="Export").click()
    expect(page.get_by_text("a worker is writing them")).to_be_visible()
    expect(page.locator("#live")).to_have_attribute("data-state", "live")

    def write() -> None:
        export = Export.objects.get(version=story.head)
        content = b'{"model_type": "llama"}'
        parts = [(blob_put(open_store(settings.STORE_URL), part), len(part)) for part in (content[:9], content[9:])]
        file = WrittenFile(name="config.json", sha256=hashlib.sha256(content).hexdigest(), parts=parts)
        export_done(claim_of(WorkKind.EXPORT, export.pk), export=export, files=[file])

    backstage(write)
    link = page.get_by_role("link", name="config.json")
    expect(link).to_be_visible()
    with page.expect_download() as download:
        link.click()
    assert download.value.path().read_bytes() == b'{"model_type": "llama"}'
    page.get_by_role("link", name="Delete the bf16 export").click()
    dialog.get_by_label("Reason").fill("it was delivered")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status").filter(has_text="The export is deleted")).to_be_visible()
    expect(link).to_have_count(0)
