"""Alerts: raised once while open, holding their lane until a person has looked."""

from __future__ import annotations

import pytest

from controlplane.conductor.shipping import advance_lanes
from controlplane.errors import Conflict, Invalid
from controlplane.models import Alert, AlertDelivery, Event, WorkUnit
from controlplane.services.alerts import alert_raise, alert_resolve
from controlplane.services.hooks import hook_create, hook_disable
from controlplane.states import AlertKind, EventType, WorkKind, WorkState
from tests.lane_rows import ACTOR, person
from tests.shipping_rig import lane_of, shipping_world

pytestmark = pytest.mark.django_db


def raised(world, subject="refusal", *, holds=True, kind=AlertKind.BEHAVIOUR):
    detail = {"about": f"{subject} of version 0-1", "reason": "it rose"}
    return alert_raise(lane=world.lane, kind=kind, subject=subject, detail=detail, holds=holds)


def test_one_open_alert_for_each_kind_and_subject():
    world = shipping_world()
    first = raised(world)
    assert raised(world) is None
    assert raised(world, "length") is not None
    assert raised(world, kind=AlertKind.DIVERGENCE) is not None
    alert_resolve(alert=first, user=person("ann"), actor=ACTOR, reason="looked at it")
    assert raised(world) is not None
    assert Event.objects.filter(type=EventType.ALERT_RAISED).count() == 4


def test_an_alert_of_a_project_alone_is_raised_once_too():
    world = shipping_world()
    values = {"lane": None, "project": world.project, "kind": AlertKind.ORPHANS, "subject": "feedback", "detail": {}}
    assert alert_raise(**values) is not None
    assert alert_raise(**values) is None


def test_a_hold_lasts_as_long_as_any_alert_that_holds_is_open():
    world = shipping_world(interval_s=3600.0)
    advance_lanes()
    assert lane_of(world).next_slot_at is not None
    first, second = raised(world), raised(world, "length")
    raised(world, "questions", holds=False)
    assert lane_of(world).hold_reason == "behaviour alert on refusal of version 0-1"
    advance_lanes()
    assert lane_of(world).next_slot_at is None
    alert_resolve(alert=first, user=person("ann"), actor=ACTOR, reason="a fluke")
    assert lane_of(world).hold_reason == "behaviour alert on length of version 0-1"
    alert_resolve(alert=second, user=person("ann"), actor=ACTOR, reason="a fluke")
    assert lane_of(world).hold_reason == ""
    advance_lanes()
    assert lane_of(world).next_slot_at is not None


def test_resolving_takes_a_reason_and_is_done_once():
    world = shipping_world()
    alert, ann = raised(world), person("ann")
    with pytest.raises(Invalid):
        alert_resolve(alert=alert, user=ann, actor=ACTOR, reason=" ")
    done = alert_resolve(alert=alert, user=ann, actor=ACTOR, reason="the prompt was odd")
    assert (done.resolved_by, done.resolution) == (ann, "the prompt was odd")
    with pytest.raises(Conflict):
        alert_resolve(alert=alert, user=ann, actor=ACTOR, reason="again")
    last = Event.objects.filter(type=EventType.ALERT_RESOLVED).get()
    assert (last.reason, last.data["subject"]) == ("the prompt was odd", "refusal of version 0-1")


def test_every_hook_that_is_on_gets_a_delivery_and_its_work():
    world = shipping_world()
    hooks = [hook_create(project=world.project, url=f"https://hooks.example/{n}", actor=ACTOR)[0] for n in range(3)]
    hook_disable(hook=hooks[2], actor=ACTOR, reason="nobody there")
    alert = raised(world)
    deliveries = AlertDelivery.objects.filter(alert=alert)
    assert {delivery.hook_id for delivery in deliveries} == {hooks[0].pk, hooks[1].pk}
    units = WorkUnit.objects.filter(kind=WorkKind.NOTIFY)
    assert set(units.values_list("ref", flat=True)) == set(deliveries.values_list("pk", flat=True))
    hook_disable(hook=hooks[1], actor=ACTOR, reason="nobody there either")
    assert sorted(units.values_list("state", flat=True)) == [WorkState.CANCELLED, WorkState.QUEUED]
    assert Alert.objects.count() == 1
