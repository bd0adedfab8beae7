"""What is kept of users: metadata alone without consent, nothing that a lane redacts, nothing after an erasure."""

import uuid

import openai
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection

from benchmarks.scripted_engine import Reply, ScriptedEngine
from controlplane.models import Event, Generation, Lane, Project
from controlplane.services.erasures import user_erase
from controlplane.services.generations import user_hash
from controlplane.states import Consent, EventType, GenerationOutcome, Scope
from rl_core.chat import ChatTokenizer
from rl_core.store import open_store
from rl_core.types import Trajectory
from tests.controlplane.gateway.gateway_rig import generation_of
from tests.lane_rows import ACTOR, thumbs

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "my number is 4111-1111-1111-1111"


class Says:
    """An engine that says `text`, by the real tokenizer; `breaks` it off after some tokens."""

    def __init__(self, folder):
        self.tokenizer = ChatTokenizer.load(folder)
        self.text = "Noted."
        self.breaks = None
        self.token_s = 0.0
        self.engine = ScriptedEngine(self.reply)

    def reply(self, body):
        tokens = self.tokenizer.encode(self.text)
        return Reply(tokens=tokens, text=self.text, token_s=self.token_s, breaks_after=self.breaks)


@pytest_asyncio.fixture
async def says(bare, folder):
    made = Says(folder)
    async with made.engine.serving():
        await sync_to_async(bare.place)(made.engine.url)
        yield made


async def ask(client, text=SECRET, *, user="user-1", consent="train", session="", segment="", **options):
    headers = {"X-Slipway-User": user, "X-Slipway-Consent": consent, "X-Slipway-Session": session}
    headers["X-Slipway-Segment"] = segment
    return await client.chat.completions.create(
        model="assistant", messages=[{"role": "user", "content": text}], extra_headers=headers, **options
    )


def blobs(settings):
    """Everything in the store."""
    store = open_store(settings.STORE_URL)
    return [store.get(info.key) for info in store.list("")]


def rows_with(*needles):
    """Every row of every table whose text holds one of the needles, by table and needle."""
    found = []
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace"
        )
        tables = [name for (name,) in cursor.fetchall()]
        assert len(tables) > 30
        for table in tables:
            for needle in needles:
                cursor.execute(f'SELECT count(*) FROM "{table}" AS t WHERE strpos(t::text, %s) > 0', [needle])
                if count := cursor.fetchone()[0]:
                    found.append((table, needle, count))
    return found


def needles_kept(settings, *needles):
    """Which needles stand in a table or in a blob."""
    in_rows = {needle for _, needle, _ in rows_with(*needles)}
    in_blobs = {needle for needle in needles if any(needle.encode() in blob for blob in blobs(settings))}
    return in_rows | in_blobs


@pytest.mark.parametrize(("request_consent", "project_consent"), [("none", "train"), ("", "train"), ("train", "none")])
async def test_without_consent_only_metadata_is_kept(bare, client, says, settings, request_consent, project_consent):
    await Project.objects.filter(pk=bare.project.pk).aupdate(consent=project_consent)
    row = await generation_of(await ask(client, consent=request_consent, stop=["4111-1111"]))
    assert (row.consent, row.content_key, row.prompt_hash, row.trainable) == (Consent.NONE, "", "", False)
    assert row.behaviour["tokens"] == row.sampled_tokens == 6
    assert row.user_hash
    assert blobs(settings) == []
    assert await sync_to_async(rows_with)("4111-1111", "Noted", "user-1") == []


async def test_the_project_s_consent_counts_as_it_is_when_the_answer_ends(bare, client, says, settings):
    """Withdrawn while the answer streams, and while the route still says otherwise: nothing is written."""
    says.token_s = 0.1  # slow enough not to end before the withdrawal
    stream = await ask(client, stream=True)
    await Project.objects.filter(pk=bare.project.pk).aupdate(consent=Consent.NONE)
    chunks = [chunk async for chunk in stream]
    assert (await generation_of(chunks[0])).content_key == ""
    assert blobs(settings) == []


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 8, 32), (1.0, 40, 40)])
async def test_only_the_lane_s_share_of_contents_is_kept(bare, client, says, settings, share, least, most):
    await Lane.objects.aupdate(record_share=share)
    for _ in range(5):
        await ask(client, n=8)
    rows = Generation.objects.filter(lane=bare.lane, consent=Consent.TRAIN)
    kept = await rows.exclude(content_key="").acount()
    assert await rows.acount() == 40
    assert least <= kept <= most
    assert len(blobs(settings)) == kept


REDACTIONS = {"card": r"\b\d{4}(-\d{4}){3}\b", "email": r"[\w.]+@[\w.]+\w"}


async def test_what_a_lane_redacts_reaches_neither_table_nor_blob(bare, client, says, settings):
    await Lane.objects.aupdate(redactions=REDACTIONS)
    says.text = (
        'Sent to ann@example.org, é: <tool_call>{"name": "send", "arguments": {"to": "bob@example.org"}}</tool_call>'
    )
    tools = [{"type": "function", "function": {"name": "send"}}]
    answer = await ask(client, session="of cat@example.org", tools=tools)
    assert "ann@example.org" in answer.choices[0].message.content
    row = await generation_of(answer)
    assert (row.trainable, row.consent, row.prompt_hash) == (False, Consent.EVAL, "")
    assert row.session == "of [email]"
    trajectory = Trajectory.from_bytes(open_store(settings.STORE_URL).get_blob(row.content_key))
    assert trajectory.messages[-2].content == "my number is [card]"
    assert trajectory.messages[-1].content.startswith("Sent to [email], é: <tool_call>")
    assert [(call.tool, call.arguments) for call in trajectory.tool_calls] == [("send", '{"to":"[email]"}')]
    assert trajectory.segments == []
    kept = await sync_to_async(needles_kept)(settings, "4111-1111", "example.org", "my number")
    assert kept == {"my number"}


async def test_a_conversation_without_matches_is_kept_as_it_is(bare, client, says):
    await Lane.objects.aupdate(redactions=REDACTIONS)
    row = await generation_of(await ask(client, "nothing to see", session="s1"))
    assert (row.trainable, row.consent, row.session) == (True, Consent.TRAIN, "s1")
    assert row.content_key


@pytest.mark.parametrize("redactions", [{"broken": "("}, {"backreference": r"(a)\1"}])
async def test_where_redacting_fails_no_content_is_kept(bare, client, says, settings, redactions):
    await Lane.objects.aupdate(redactions=redactions)
    row = await generation_of(await ask(client, session="of cat@example.org"))
    assert (row.content_key, row.session, row.trainable, row.outcome) == ("", "", False, GenerationOutcome.ANSWERED)
    assert blobs(settings) == []


async def test_a_user_key_means_the_same_in_a_header_and_in_an_erasure(bare, says, web):
    """Header values are bytes: what is sent as UTF-8 is read as UTF-8."""
    key = await sync_to_async(bare.key)()
    body = {"model": "assistant", "messages": [{"role": "user", "content": "x"}]}
    for user, status in (("Zoë".encode(), 200), (b"\xff", 400), (b"a\tb", 400)):
        headers = [(b"Authorization", f"Bearer {key}".encode()), (b"X-Slipway-User", user)]
        reply = await web.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == status, reply.text
        if status == 400:
            assert reply.json()["error"]["param"] == "X-Slipway-User"
    row = await Generation.objects.aget()
    assert row.user_hash == user_hash(lane=bare.lane, user_key="Zoë")


ZEBRA = {
    "key": "zebra-user-77",
    "prompt": "zebra prompt words",
    "answer": "zebra answer words",
    "broken": "zebra broken off words",
    "session": "zebra-session-9",
    "segment": "zebra-segment",
    "comment": "zebra comment words",
    "demonstration": "zebra demonstration words",
    "tag": "zebra tag words",
    "late": "zebra late words",
    "refused": "zebra refused words",
}


async def feed(web, headers, target, **changes):
    kind = "episode" if target == ZEBRA["session"] else "generation"
    body = {**thumbs(target), "target": {"kind": kind, "id": str(target)}, **changes}
    body["actor"] = changes.get("actor", {"hash": ZEBRA["key"], "kind": "user"})
    return (await web.post("/api/v1/feedback", json=body, headers=headers)).status_code


async def leave_traces(bare, client, says, web):
    """Everything that a user can leave: answers, a broken answer, feedback of every kind, a refused payload."""
    user = {"user": ZEBRA["key"], "session": ZEBRA["session"], "segment": ZEBRA["segment"]}
    says.text = ZEBRA["answer"]
    answer = await ask(client, ZEBRA["prompt"], n=2, stop=["zebra stop"], **user)
    says.text, says.breaks = ZEBRA["broken"], 20
    with pytest.raises(openai.InternalServerError):
        await ask(client, ZEBRA["prompt"], **user)
    says.text, says.breaks = "other answer words", None
    await ask(client, "other prompt words", user="another", session="other-session")
    headers = {"Authorization": f"Bearer {await sync_to_async(bare.key)(Scope.FEEDBACK)}"}
    texts = {"comment": ZEBRA["comment"], "demonstration": ZEBRA["demonstration"], "tags": {"why": ZEBRA["tag"]}}
    assert await feed(web, headers, answer.id, **texts) == 201
    assert await feed(web, headers, answer.choices[1].generation_id, comment=ZEBRA["comment"]) == 201
    assert await feed(web, headers, ZEBRA["session"], comment=ZEBRA["comment"]) == 201
    assert await feed(web, headers, uuid.uuid4(), comment=ZEBRA["late"]) == 202
    refused = {"signal": "no_such_signal", "comment": ZEBRA["refused"]}
    assert await feed(web, headers, answer.id, **refused) == 404
    return user_hash(lane=bare.lane, user_key=ZEBRA["key"])


async def test_after_an_erasure_nothing_of_the_user_is_left_anywhere(bare, client, says, web, settings):
    """Every text of every table and every blob of the store is searched, before and after."""
    hashed = await leave_traces(bare, client, says, web)
    needles = [*ZEBRA.values(), hashed, "zebra"]
    kept = await sync_to_async(needles_kept)(settings, *needles)
    assert kept == {*needles} - {ZEBRA["broken"]}  # which broke off before its last word
    admin = {"Authorization": f"Bearer {await sync_to_async(bare.key)(Scope.ADMIN)}", "Idempotency-Key": "erase-1"}
    path = f"/api/v1/projects/{bare.project.slug}/lanes/assistant/erase"
    body = {"user": ZEBRA["key"], "reason": f"asked for by {ZEBRA['key']}"}
    reply = await web.post(path, json=body, headers=admin)
    assert (reply.status_code, reply.json()) == (200, {"generations": 3})
    assert await sync_to_async(rows_with)(*needles) == []
    assert await sync_to_async(needles_kept)(settings, *needles) == set()
    tombstones = Generation.objects.filter(erased_at__isnull=False, consent=Consent.NONE, trainable=False)
    assert await tombstones.filter(sampled_tokens__gt=0).acount() == 3
    event = await Event.objects.aget(type=EventType.USER_ERASED)
    assert (event.reason, event.data) == ("asked for by erased", {"generations": 3})
    others = await sync_to_async(needles_kept)(settings, "other answer words", "other-session")
    assert others == {"other answer words", "other-session"}
    assert (await web.post(path, json=body, headers={**admin, "Idempotency-Key": "erase-2"})).json() == {
        "generations": 0
    }


async def test_feedback_on_what_was_erased_is_refused_and_leaves_nothing(bare, client, says, web, settings):
    await leave_traces(bare, client, says, web)
    erased = [row.id async for row in Generation.objects.exclude(session="other-session")]
    store = open_store(settings.STORE_URL)
    await sync_to_async(user_erase)(lane=bare.lane, user_key=ZEBRA["key"], actor=ACTOR, reason="asked", store=store)
    headers = {"Authorization": f"Bearer {await sync_to_async(bare.key)(Scope.FEEDBACK)}"}
    assert await feed(web, headers, erased[0], comment=ZEBRA["late"], actor={"hash": "x", "kind": "user"}) == 410


async def test_an_erasure_names_somebody(bare, settings):
    from controlplane.errors import Invalid

    with pytest.raises(Invalid):
        await sync_to_async(user_erase)(
            lane=bare.lane, user_key="", actor=ACTOR, reason="asked", store=open_store(settings.STORE_URL)
        )
