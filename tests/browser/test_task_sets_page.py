"""A task set goes in as a file in a real browser: refused with its lines, then stored, proven, tried, looked at."""

import re

import pytest
from playwright.sync_api import expect

from controlplane.models import Rollout, RolloutWatch, TaskSet, TaskSetProof
from controlplane.states import ProofState
from tests.browser.conftest import Backstage, Watched
from tests.factories import Workspace
from tests.playing import play, start_run

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True)]
GOOD = (
    b'{"id": "a", "split": "train", "input": {"question": "q"}, "reference": {"answer": "2"}}\n'
    b'{"id": "h", "split": "heldout", "input": {"question": "r"}, "reference": {"answer": "2"}}\n'
)


def choose(watched: Watched, content: bytes) -> None:
    watched.page.locator("#f-file").set_input_files(
        {"name": "tasks.jsonl", "mimeType": "application/x-ndjson", "buffer": content}
    )
    watched.page.get_by_role("button", name="Check and store").click()


def test_a_file_is_refused_by_line_then_stored(watched: Watched, workspace: Workspace) -> None:
    page = watched.page
    watched.login(workspace.people["engineer"].username)
    watched.open("/task-sets/")
    page.get_by_label("Name").fill("mine")
    page.get_by_label("Environment").select_option("word-problems")
    choose(watched, GOOD + b"{")
    expect(page.get_by_text("line 3: ")).to_be_visible()
    watched.forgive("422 (Unprocessable Entity)")
    choose(watched, GOOD)
    page.wait_for_url(re.compile(r"/task-sets/[0-9a-f-]{36}/$"))
    expect(page.get_by_role("heading", name="mine version 1")).to_be_visible()


def test_proof_difficulty_history_and_watch_lead_to_one_another(
    watched: Watched, workspace: Workspace, backstage: Backstage
) -> None:
    def rows() -> TaskSet:
        run = start_run(workspace, steps=2)
        play(run, 2)
        for rollout in Rollout.objects.filter(group__run=run, state="scored"):
            RolloutWatch.objects.create(
                rollout=rollout, environment="word-problems", version=rollout.newest_version, tokens=9, tool_calls=2,
                tool_errors=1, no_edit=None, refusal=False, gap=None, impossible_passed=None, tests_touched=True,
                special_cased=False, early_exit=False, tampering=False,
            )  # fmt: skip
        task_set = TaskSet.objects.get(project=run.project)
        finding = {"task": "t", "verdict": "flaky", "detail": "before the fix 2 of 5 equal runs passed"}
        TaskSetProof.objects.create(task_set=task_set, state=ProofState.REFUSED, checked=43, findings=[finding])
        return task_set

    task_set = backstage(rows)
    page = watched.page
    watched.login(workspace.people["viewer"].username)
    watched.open(f"/task-sets/{task_set.pk}/")
    expect(page.get_by_text("2 of 5 equal runs passed")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Tasks by mean reward"))).to_be_visible()
    page.get_by_role("link", name="easiest first").click()
    page.locator("tbody th a.mono, tbody th a").first.click()
    expect(page.get_by_role("heading", name="Over policy versions")).to_be_visible()
    expect(page.get_by_text("tests touched").first).to_be_visible()
    watched.open(f"/task-sets/{task_set.pk}/")
    page.get_by_role("link", name="word-problems").last.click()
    expect(page.get_by_role("heading", name="Cheating watch")).to_be_visible()
    expect(page.get_by_text("100.0 %").first).to_be_visible()
