"""Rows that tests of lanes, feedback and the gateway start from."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db.models.functions import Now

from controlplane.models import (
    Cluster,
    Lane,
    ModelCard,
    PolicyVersion,
    Project,
    Replica,
    ReplicaSlot,
    User,
)
from controlplane.services.catalog import model_register
from controlplane.services.events import Actor
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.generations import Answer, generation_record
from controlplane.services.lanes import lane_create
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.versions import lineage_create
from controlplane.states import ActorKind, Consent, ReplicaState, SignalType, VersionState
from rl_core.store import ObjectStore
from rl_core.types import ClusterRole, FinishReason, Generated, SamplingParams, VersionSpan

ACTOR = Actor(ActorKind.SYSTEM, "test")
_numbers = itertools.count(1)


@dataclass
class LaneWorld:
    """A project with one model, one serving cluster of one replica, one lane, thumbs and their map."""

    project: Project
    model: ModelCard
    cluster: Cluster
    replica: Replica
    lane: Lane

    def generate(self, store: ObjectStore, **changes: Any) -> Any:
        """Record one generation of the promoted version."""
        version = changes.pop("version", None) or self.lane.promoted_version
        sampling = changes.pop("sampling", SamplingParams(max_tokens=8))
        generation_id = changes.pop("generation_id", None) or uuid.uuid4()
        generated = Generated(
            token_ids=[5, 6, 7],
            logprobs=[-0.1, -0.2, -0.3],
            text=changes.pop("text", "Hello."),
            finish_reason=FinishReason.STOP,
            spans=[VersionSpan(0, 3, str(version))],
            prompt_tokens=2,
        )
        answer = Answer(
            generation_id=generation_id,
            messages=[{"role": "user", "content": changes.pop("content", "Say hello")}],
            prompt_token_ids=[1, 2],
            generated=generated,
            sampling=sampling,
            latency_ms=1.5,
        )
        values: dict[str, Any] = {"user_key": "user-1", "session": "", "consent": Consent.TRAIN, **changes}
        return generation_record(lane=self.lane, version=version, answer=answer, store=store, **values)


def lane_world(**lane: Any) -> LaneWorld:
    """Make the rows through the services."""
    number = next(_numbers)
    project = Project.objects.create(slug=f"lanes-{number}-{uuid.uuid4().hex[:6]}", name="Lanes")
    model = model_register(
        project=project,
        slug="tiny",
        folder="/nowhere",
        root="a" * 64,
        manifest_key="snapshots/a/manifest.json",
        full_bytes=1000,
        parameters=500,
        architecture="LlamaForCausalLM",
        actor=ACTOR,
    )
    cluster = cluster_create(
        project=project, slug="serving", role=ClusterRole.SERVING, region="local", capacity=8, actor=ACTOR, model=model
    )
    replica = replica_register(
        cluster=cluster,
        name="serving-0",
        inference_url="http://127.0.0.1:1",
        control_url="http://127.0.0.1:2",
        actor=ACTOR,
        weight_slots=2,
    )
    made = lane_create(project=project, slug="assistant", cluster=cluster, model=model, actor=ACTOR, **lane)
    Replica.objects.filter(id=replica.id).update(state=ReplicaState.READY)
    ReplicaSlot.objects.filter(replica=replica, slot="default").update(
        desired_version=made.promoted_version, current_version=made.promoted_version
    )
    signal_define(project=project, slug="thumbs", value_type=SignalType.BOOLEAN)
    signal_map_publish(
        project=project,
        content={"signals": {"thumbs": {"values": {"true": 1.0, "false": 0.0}}}},
        author=None,
        actor=ACTOR,
    )
    made.refresh_from_db()
    return LaneWorld(project=project, model=model, cluster=cluster, replica=replica, lane=made)


def candidate_version(world: LaneWorld, *, root: str = "b" * 64) -> PolicyVersion:
    """A committed version 1 of a fresh lineage of the lane's model."""
    lineage = lineage_create(project=world.project, model=world.model, parent=None)
    return PolicyVersion.objects.create(
        lineage=lineage,
        epoch=0,
        number=1,
        state=VersionState.COMMITTED,
        parent=lineage.head,
        root=root,
        manifest_key=f"lineages/{lineage.id}/0-1/1/manifest.json",
        committed_at=Now(),
    )


def person(name: str) -> User:
    """A login."""
    return User.objects.create_user(username=f"{name}-{uuid.uuid4().hex[:8]}", password="x")


def thumbs(generation_id: Any, *, value: Any = True, **changes: Any) -> dict[str, Any]:
    """A feedback body."""
    body: dict[str, Any] = {
        "event_id": str(uuid.uuid4()),
        "signal": "thumbs",
        "target": {"kind": "generation", "id": str(generation_id)},
        "value": value,
        "occurred_at": datetime.now(UTC).isoformat(),
        "actor": {"hash": "u1", "kind": "user"},
        "consent": "train",
    }
    return {**body, **changes}
