"""Whoever watches over a remote session reads each of its calls once, however often it looks."""

import shutil

import pytest
from asgiref.sync import sync_to_async

from controlplane.models import new_id
from controlplane.selectors.rollout_plans import rollout_plan
from controlplane.services.rollout_sessions import call_record
from rl_core.environments.remote.capture import Captured
from rl_core.session_specs import Limits
from rl_core.types import FinishReason, Generated, VersionSpan
from tests.remote_rows import PlayedElsewhere, played_elsewhere
from workers import base
from workers.progress import ProgressWriter, SliceClock
from workers.remote_sessions import RemoteWatch

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def folder(tmp_path, settings):
    settings.STORE_URL = (tmp_path / "store").as_uri()
    base.store.cache_clear()
    yield tmp_path
    base.store.cache_clear()


def answered(played: PlayedElsewhere, number: int) -> None:
    """A call of the session, written down."""
    generated = Generated(
        token_ids=[number + 5], logprobs=[-1.0], text="", finish_reason=FinishReason.STOP,
        spans=[VersionSpan(0, 1, str(played.run.lineage.head.ref))], prompt_tokens=1,
    )  # fmt: skip
    captured = Captured(
        number=0, messages=[{"role": "user", "content": "?"}], prompt_token_ids=[1], generated=generated, text="a"
    )
    call_record(
        session_id=played.session.pk, call_id=new_id(), captured=captured, parent=None, request=f"{number}", mark="",
        repeated=False, context=f"{number}", store=base.store(), limits=Limits(max_turns=8),
    )  # fmt: skip


async def in_database(action):
    return await sync_to_async(action)()


async def test_calls_are_read_once(folder):
    played = await in_database(lambda: played_elsewhere(folder, tokens=folder))
    plan = await in_database(lambda: rollout_plan(played.group))
    writer = ProgressWriter(played.claim, plan.lineage_id)
    watch = RemoteWatch(played.claim, plan, plan.remote, SliceClock(0.0), in_database, writer)
    await in_database(lambda: answered(played, 0))
    assert (await watch._trajectory(played.session.pk, None)).sampled_tokens() == 1
    shutil.rmtree(folder / "store")
    await in_database(lambda: answered(played, 1))
    for _ in range(2):
        seen = await watch._trajectory(played.session.pk, None)
        assert [segment.token_ids for segment in seen.segments] == [[1, 5], [1, 6]]
