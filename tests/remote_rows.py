"""Rows for tests of remote environments: a run whose rollout is played elsewhere, with an open session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.db.models import F

from controlplane.models import (
    ModelCard,
    Project,
    RemoteEnvironment,
    Replica,
    ReplicaSlot,
    Rollout,
    RolloutGroup,
    RolloutSession,
    Run,
    WorkUnit,
)
from controlplane.services.remote_environments import remote_environment_register
from controlplane.services.rollout_sessions import rollout_session_open, session_key
from controlplane.services.work import Claim, work_claim
from controlplane.states import GroupState, RolloutState, WorkKind
from rl_core.environments.remote.messages import Described
from rl_core.environments.remote.protocol import Kind
from tests.domain_factories import TESTER, make_group, make_run

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="


def make_remote(
    project: Project, *, slug: str = "shop", url: str = "http://127.0.0.1:9/", **told: Any
) -> RemoteEnvironment:
    """A registered remote environment."""
    described = told.pop("described", Described(kind=Kind.ENVIRONMENT, example={"task": {}}))
    values = {"title": "Shop", "secret": SECRET, "session_s": 600, "max_turns": 5} | told
    return remote_environment_register(project=project, slug=slug, url=url, described=described, actor=TESTER, **values)


@dataclass
class PlayedElsewhere:
    """One rollout of a run, its session, and the key of it."""

    run: Run
    group: RolloutGroup
    rollout: Rollout
    session: RolloutSession
    claim: Claim

    @property
    def key(self) -> str:
        """The session's bearer key."""
        return session_key(self.session.pk)


def played_elsewhere(
    folder: Path, *, tokens: Path, engine_url: str = "http://127.0.0.1:1", **stage: Any
) -> PlayedElsewhere:
    """A session that is open, on replicas that hold the run's version."""
    run = make_run(**({"sampling": {"max_tokens": 200}, "max_turns": 8, "max_context_tokens": 1536} | stage))
    ModelCard.objects.filter(project=run.project).update(folder=str(folder))
    make_remote(run.project)
    group = make_group(run, state=GroupState.RUNNING, size=1)
    rollout = Rollout.objects.create(group=group, attempt=0, state=RolloutState.RUNNING)
    unit = WorkUnit.objects.create(kind=WorkKind.ROLLOUT, ref=group.pk, run=run, project=run.project)
    claim = work_claim(unit_id=unit.pk, worker="test")
    assert claim is not None
    opened = rollout_session_open(claim, rollout_id=rollout.pk, slug="shop")
    hold(run, tokens=tokens, engine_url=engine_url)
    return PlayedElsewhere(run, group, rollout, RolloutSession.objects.get(pk=opened.id), claim)


def hold(run: Run, *, tokens: Path, engine_url: str) -> None:
    """Let every replica of the run's project hold its head, at one engine."""
    replicas = Replica.objects.filter(cluster__project=run.project)
    replicas.update(inference_url=engine_url)
    for replica in replicas:
        (tokens / f"{replica.pk}.inference").write_text("token")
    ReplicaSlot.objects.filter(replica__in=replicas).update(current_version=run.lineage.head)


def age(session: RolloutSession, *, seconds: float) -> None:
    """Let the session's time pass."""
    from datetime import timedelta

    RolloutSession.objects.filter(pk=session.pk).update(deadline_at=F("deadline_at") - timedelta(seconds=seconds))
