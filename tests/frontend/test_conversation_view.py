"""A session as its page tells it: windows, summaries, calls side by side, and what was never read."""

from __future__ import annotations

import asyncio

import pytest
from django.conf import settings
from django.test import Client
from django.urls import reverse

from controlplane.models import Rollout
from controlplane.selectors.pages_conversation import MAX_MESSAGE_CHARACTERS, conversation
from controlplane.selectors.pages_trajectory import MAX_ARTIFACT_CHARACTERS, MAX_TOKENS, trajectory_view
from rl_core.chat import ChatTokenizer
from rl_core.environments.word_problems import build_task_set, messages
from rl_core.session_specs import CompactionKind
from rl_core.store import open_store
from rl_core.types import Ending, Message, Role, SamplingParams, TokenSegment, ToolCall, Trajectory, VersionSpan
from tests.rl_core.chat_factory import chat_folder
from tests.rl_core.environments.digging import dig, play

pytestmark = pytest.mark.django_db

TURNS = [dig("A"), dig("B"), dig("C"), "All sand.", dig("D", 9) + "<tool_call>oops</tool_call>", "At D."]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatTokenizer.load(chat_folder(tmp_path_factory.mktemp("chat")))


def dug(chat, turns=TURNS, **options):
    session, _ = asyncio.run(play(chat, turns, max_parallel_calls=4, **options))
    return session.trajectory


def test_a_window_is_marked_where_it_begins_and_a_summary_is_told_apart(chat) -> None:
    trajectory = dug(chat)
    views = conversation(trajectory)
    marks = [(view.role, view.mark) for view in views if view.mark]
    assert [(role, mark.number, mark.how) for role, mark in marks] == [("user", 2, "the task and the summary")]
    assert marks[0][1].tokens == trajectory.segments[1].loss_mask.index(1)
    assert [(view.role, view.note) for view in views if view.note and view.role != "tool"] == [
        ("user", "asked for a summary"),
        ("assistant", "summary"),
        ("user", "begins again with the summary"),
    ]
    turns = [*(dig(mark, 600) for mark in "ABCD"), "At D."]
    dropped = conversation(dug(chat, turns, kind=CompactionKind.DROP_TOOL_RESULTS))
    assert next(view.mark.how for view in dropped if view.mark) == "the same turns without the oldest results"


def test_calls_stand_with_their_turn_and_their_answers_below(chat) -> None:
    views = conversation(dug(chat))
    said = [view for view in views if view.role == "assistant"]
    assert [len(view.calls) for view in said] == [1, 1, 1, 0, 2, 0]
    calls = said[4].calls
    assert [(call.number, call.of, call.tool, call.ok) for call in calls] == [
        (1, 2, "dig", True),
        (2, 2, "", False),
    ]
    assert [call.result for call in calls] == ["", ""]
    answers = [view for view in views if view.role == "tool"][3:]
    assert [view.note for view in answers] == ["answers call 1 of 2", "answers call 2 of 2"]
    assert [bool(view.tokens) for view in answers] == [True, False]
    assert [view.together for view in answers] == [True, False]


def test_worked_examples_are_no_turns(chat) -> None:
    task = build_task_set().tasks[0]
    opening = [Message(role=m.role, content=m.content, parent=n - 1) for n, m in enumerate(messages(task))]
    said = Message(role=Role.ASSISTANT, content="<calc>1</calc>", parent=len(opening) - 1, segment=0, start=1, end=2)
    segment = TokenSegment(
        token_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0], spans=[VersionSpan(1, 2, "v:0-0")],
        sampling=SamplingParams(),
    )  # fmt: skip
    call = ToolCall(tool="calculator", arguments='{"expression":"1"}', result="1", ok=True, turn=0)
    views = conversation(Trajectory(task_id="t", messages=[*opening, said], segments=[segment], tool_calls=[call]))
    assert sum(m.role is Role.ASSISTANT for m in opening) == 4
    assert [len(view.calls) for view in views] == [*[0] * len(opening), 1]
    assert views[-1].calls[0].result == "1"


def test_an_answer_that_came_too_late_was_never_read(chat) -> None:
    trajectory = dug(chat, [dig("A")], max_turns=1)
    assert trajectory.ending is Ending.TRUNCATED
    assert conversation(trajectory)[-1].note == "never read"


def test_the_page_is_bounded_whatever_the_session_was(played, chat) -> None:
    workspace, run = played
    trajectory = dug(chat)
    whole = trajectory.segments[0]
    trajectory.segments += [whole] * (MAX_TOKENS // len(whole.token_ids) + 2)
    trajectory.artifacts["patch"] = "p" * (MAX_ARTIFACT_CHARACTERS + 7)
    last = trajectory.messages[-1]
    trajectory.messages.append(
        Message(role=Role.TOOL, content="m" * (MAX_MESSAGE_CHARACTERS + 9), parent=len(trajectory.messages) - 1)
    )
    rollout = Rollout.objects.filter(group__run=run, group__step__isnull=False).first()
    rollout.trajectory_key = open_store(settings.STORE_URL).put_blob(trajectory.to_bytes())
    rollout.save(update_fields=["trajectory_key"])
    view = trajectory_view(rollout)
    assert sum(len(segment.tokens) for segment in view.segments) == MAX_TOKENS
    assert view.segments[-1].left_out == len(whole.token_ids)
    assert (view.artifacts[-1].left_out, view.messages[-1].left_out) == (7, 9)
    client = Client()
    client.force_login(workspace.owner)
    page = client.get(reverse("rollout", args=[rollout.pk])).content.decode()
    assert "begins with the task and the summary" in page
    assert 'href="#segment-2"' in page
    assert 'id="segment-2"' in page
    assert "call 2 of 2" in page
    assert "9 further characters are not shown" in page
    assert last.content in page
