"""The demonstration's lane: what it serves, its users' signals and what they are worth, its cadence, its two doors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from django.conf import settings

from controlplane.models import Cluster, FeedbackSource, Lane, ModelCard, Project, SignalDefinition, SignalMap
from controlplane.processes.records import write_atomically
from controlplane.services.cadence import cadence_update
from controlplane.services.events import SYSTEM
from controlplane.services.lanes import lane_create
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.sources import source_create, source_rotate
from controlplane.services.tenancy import api_key_authenticate, api_key_create
from controlplane.states import Scope, SignalType
from rl_core.environments import short_replies

LANE = "assistant"
SOURCE = "demo-app"
SIGNALS = {
    "thumbs": SignalType.BOOLEAN,
    "dissatisfied_followup": SignalType.BOOLEAN,
    "edit_persisted": SignalType.BOOLEAN,
}
HORIZON_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneAccess:
    """What a product needs to speak to the lane and to send feedback."""

    gateway_key: str
    source_secret: str


def seed_lane(*, project: Project, serving: Cluster, model: ModelCard) -> Lane:
    """The lane with its signals, their map and a cadence that runs by hand alone. Safe to run again."""
    lane = Lane.objects.filter(project=project, slug=LANE).first() or lane_create(
        project=project, slug=LANE, cluster=serving, model=model, actor=SYSTEM, system_prompt=short_replies.SYSTEM
    )
    for slug, value_type in SIGNALS.items():
        if not SignalDefinition.objects.filter(project=project, slug=slug).exists():
            signal_define(project=project, slug=slug, value_type=value_type)
    if not SignalMap.objects.filter(project=project).exists():
        signal_map_publish(project=project, content=signal_map(), author=None, actor=SYSTEM)
    if not lane.cadence:
        lane = cadence_update(lane=lane, cadence=lane_cadence(), actor=SYSTEM, reason="seeded: slots open by hand")
    return lane


def lane_access(project: Project) -> LaneAccess:
    """The gateway key and the signing secret of last time, kept in a file that only we can read; new ones otherwise."""
    path = settings.STATE_DIR / "demo_lane.json"
    known = msgspec.json.decode(path.read_bytes(), type=dict[str, str]) if path.exists() else {}
    key, secret = known.get("gateway_key", ""), known.get("source_secret", "")
    found = api_key_authenticate(token=key) if key else None
    if found is None or found.project_id != project.pk:
        _, key = api_key_create(project=project, name="demonstration", scopes=[Scope.GATEWAY], actor=SYSTEM)
    source = FeedbackSource.objects.filter(project=project, slug=SOURCE).first()
    if source is None:
        _, secret = source_create(project=project, slug=SOURCE, actor=SYSTEM)
    elif not secret:
        secret = source_rotate(source=source, actor=SYSTEM)
    write_atomically(path, msgspec.json.encode({"gateway_key": key, "source_secret": secret}))
    return LaneAccess(gateway_key=key, source_secret=secret)


def signal_map(*, inverted: bool = False) -> dict[str, Any]:
    """What signals are worth. `inverted` is the mistake that the lane's demonstration makes on purpose."""
    good, bad = (0.0, 1.0) if inverted else (1.0, 0.0)
    return {
        "signals": {
            "thumbs": {"values": {"true": good, "false": bad}},
            "dissatisfied_followup": {"values": {"true": bad}, "weight": 0.5},
            "edit_persisted": {"values": {"true": good, "false": bad}, "weight": 0.5},
        },
        "horizon_s": HORIZON_S,
    }


def lane_cadence(*, interval_s: float = 0.0) -> dict[str, Any]:
    """A cadence of the size of a demonstration: horizons of seconds, one canary step, tens of users.

    Forty users an arm show gross harm alone, hence the canary's wide margin on thumbs; the gate sees finer.
    """
    learned = {
        "evaluation_environment": short_replies.SLUG,
        "evaluation_task_set": short_replies.SLUG,
        "evaluation_rubric": short_replies.RUBRIC.slug,
        "eval_tasks": 64,
    }
    return {
        "interval_s": interval_s,
        "minimum_signals": 165,
        "horizon_s": HORIZON_S,
        "deadline_s": 480,
        "stage": {
            **learned,
            "minimum_answers": 100,
            "optimizer_steps": 2,
            # The flooder sends dozens of events in a window; nobody honest more than a few.
            "window": {"arms": ["promoted", "canary"], "events_an_hour": 30},
        },
        "gate": {
            "environment": short_replies.SLUG,
            "task_set": short_replies.SLUG,
            "rubric": short_replies.RUBRIC.slug,
            "tasks": 64,
            "temperature": 1.0,
            "margin": 0.1,
        },
        "canary": {
            "steps": [0.5],
            "hold_s": 15,
            "minimum_users": 25,
            "alpha": 0.1,
            "metrics": [
                {
                    "name": "thumbs",
                    "source": "signal",
                    "key": "thumbs",
                    "role": "goal",
                    "direction": "higher",
                    "margin": 0.35,
                    "alpha_share": 0.6,
                },
                {
                    "name": "tokens",
                    "source": "behaviour",
                    "key": "tokens",
                    "role": "guardrail",
                    "direction": "lower",
                    "margin": 1.0,
                },
                {
                    "name": "failures",
                    "source": "failure",
                    "role": "guardrail",
                    "direction": "lower",
                    "margin": 0.1,
                },
            ],
        },
        # A person would be asked to look; here nobody is there to, and shorter replies are what is wanted.
        "monitors": {"hold": False},
        "auto_promote": True,
    }
