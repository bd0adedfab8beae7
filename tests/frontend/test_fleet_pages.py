"""The clusters page: full, empty, hostile; who sees and does which acts; what they leave behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models import F, Value
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.models import (
    Cluster,
    Event,
    LendingPolicy,
    Loan,
    PolicyVersion,
    Project,
    Replica,
    ReplicaSlot,
    Transfer,
)
from controlplane.selectors.pages_chain import chains_view
from controlplane.selectors.pages_fleet import SlotView, clusters_view, totals_of
from controlplane.selectors.pages_transfers import transfers_view
from controlplane.states import DesiredSource, EventType, LoanState, MemberRole, TransferState
from frontend.looks import version_name
from frontend.templatetags.engine_metrics import engine_metrics
from frontend.views.fleet import PARTS
from frontend.views.fleet_acts import VERBS
from tests.factories import HOSTILE, make_workspace
from tests.fleet_story import FleetStory, fleet_story

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def fleet(django_db_setup, django_db_blocker) -> Iterator[FleetStory]:
    """What a test changes is rolled back after it."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield fleet_story(hostile=HOSTILE)
        transaction.set_rollback(True)


def client_of(story: FleetStory, role: MemberRole = MemberRole.OWNER) -> Client:
    client = Client()
    client.force_login(story.workspace.people[role.value])
    return client


def addresses(story: FleetStory) -> list[str]:
    return [
        reverse("clusters"),
        *(reverse("clusters_part", args=[part]) for part in PARTS),
        *(reverse("replica_act", args=[story.lent.pk, verb]) for verb in VERBS),
        reverse("replica_act", args=[story.poisoned.pk, "repair"]),
        reverse("replica", args=[story.poisoned.pk]),
        reverse("lending_allow"),
        reverse("lending_settings", args=[story.serving.pk]),
        reverse("cluster_settings", args=[story.serving.pk]),
        reverse("events"),
    ]


def text_of(client: Client, address: str) -> str:
    return client.get(address).content.decode()


def test_every_page_answers_escapes_and_holds_no_inline_script(fleet: FleetStory) -> None:
    client = client_of(fleet)
    for address in addresses(fleet):
        response = client.get(address)
        assert response.status_code == 200, address
        body = response.content.decode()
        for forbidden in ("<script>", "<b onmouseover", "\x1b", " style=", " onclick=", "javascript:", 'src="http'):
            assert forbidden not in body, (address, forbidden)
        if "<form" not in body.split("<main", 1)[-1]:
            assert "\u202e" not in body, address
    page = text_of(client, reverse("clusters"))
    for told in ("a fan is loud", "a big evaluation tonight", "waits for 22:00", "slot default says root"):
        assert re.search(rf"{told}[^<]*&lt;script&gt;", page), told


def test_the_page_says_what_there_is(fleet: FleetStory) -> None:
    client = client_of(fleet)
    page = text_of(client, reverse("clusters"))
    regions = re.findall(r'class="region-head"[^>]*>([\w-]+)<', page)
    assert regions == ["ap-northeast", "eu-central", "us-west"]
    tokyo = page.index("rollout-tokyo")
    assert "poisoned" in page[tokyo:]
    assert "not trusted" in page[tokyo:]
    assert "tried 2 times of 3" in page
    assert "40 %" in page
    assert "19.2 MB of 48 MB" in page
    assert "3.2 MB/s" in page
    assert "9.0 s left" in page
    assert "Mon,Tue,Wed,Thu,Fri 22:00-06:00" in page
    planner = text_of(client, reverse("clusters_part", args=["planner"]))
    assert "To keep the trainer busy" in planner
    assert "MI300X" in planner


def test_what_is_wrong_comes_with_what_to_do(fleet: FleetStory) -> None:
    west = Replica.objects.get(cluster__slug="rollout-west")
    Replica.objects.filter(pk=fleet.poisoned.pk).update(repairs=3)
    Replica.objects.filter(pk=west.pk).update(state="offline", error="its lease lapsed", lease_until=timezone.now())
    Transfer.objects.filter(pk=fleet.moving.pk).update(state="failed", error="the store answers 503")
    assert act(fleet, fleet.serving.replicas.get(name="engine-2"), "pin", slot="default", version=fleet.head.pk) == 302
    page = text_of(client_of(fleet), reverse("clusters"))
    for said in (
        "is not tried again: look at its machine, then <strong>repair</strong> it",
        "it is back when it renews or, once it is forgotten, when its engine is started again",
        "the store answers 503",
        "slot default is pinned: because pin",
        "<strong>1 draining</strong>, <strong>1 offline</strong>, <strong>1 poisoned</strong>",
    ):
        assert said in page, said


def test_a_replica_has_a_page_with_what_happened_to_it(fleet: FleetStory) -> None:
    address = reverse("replica", args=[fleet.lent.pk])
    assert f'href="{address}"' in text_of(client_of(fleet), reverse("clusters"))
    assert act(fleet, fleet.lent, "drain") == 302
    page = text_of(client_of(fleet, MemberRole.VIEWER), address)
    engineer = fleet.workspace.people["engineer"].username
    assert re.search(rf"{engineer} · “because drain”", page)
    assert re.search(r"a big evaluation tonight[^<]*&lt;script&gt;", page)
    assert "\u202e" not in page
    assert "data-act" not in page
    assert "slot default says root" not in page
    assert {one.transfer.replica_id for one in transfers_view(fleet.workspace.project, replica=fleet.lent).moving} == {
        fleet.lent.pk
    }
    other = Client()
    other.force_login(make_workspace().owner)
    assert other.get(address).status_code == 404
    part = client_of(fleet).get(address, headers={"X-Slipway-Fragment": "1"}).content.decode()
    assert "<html" not in part
    assert reverse("replica_act", args=[fleet.lent.pk, "undrain"]) in part


def test_a_replica_that_has_no_version_is_behind_by_time_alone(fleet: FleetStory) -> None:
    ReplicaSlot.objects.filter(replica=fleet.moving.replica).update(current_version=None, current_root="")
    ReplicaSlot.objects.filter(replica=fleet.lent, slot="candidate").update(current_version=F("desired_version"))
    page = text_of(client_of(fleet), reverse("clusters_part", args=["regions"]))
    assert "holding none yet" in page
    assert "0 versions" not in page


def test_what_may_not_be_lent_has_no_act_for_it(fleet: FleetStory) -> None:
    spare = fleet.serving.replicas.get(name="engine-2")
    address = reverse("replica_act", args=[spare.pk, "lend"])
    assert address in text_of(client_of(fleet), reverse("clusters"))
    Project.objects.filter(pk=fleet.workspace.project.pk).update(lending_allowed=False)
    assert address not in text_of(client_of(fleet), reverse("clusters"))


def test_versions_to_pin_say_whose_they_are_and_are_not_retired(fleet: FleetStory) -> None:
    first = PolicyVersion.objects.get(lineage=fleet.run.lineage, number=0)
    PolicyVersion.objects.filter(pk=first.pk).update(retired_at=timezone.now())
    west = Replica.objects.get(cluster__slug="rollout-west")
    page = text_of(client_of(fleet), reverse("replica_act", args=[west.pk, "pin"]))
    assert f"{version_name(fleet.head)} of Word problems" in page
    assert version_name(first) + " of" not in page


def test_engines_figures_are_in_words(fleet: FleetStory) -> None:
    told = [("idle_share", 0.2), ("odd_s", 3.25), ("polled_at", 1e9), ("running", 2)]
    assert engine_metrics(told) == [("requests under way", "2"), ("idle of late", "20 %"), ("odd_s", "3.25")]
    assert "requests under way" in text_of(client_of(fleet), reverse("clusters"))


def test_lag_is_in_versions_and_time(fleet: FleetStory) -> None:
    newer = PolicyVersion.objects.filter(lineage=fleet.run.lineage, number__gt=0)
    for version in newer:
        since = timezone.now() - timedelta(hours=3) + timedelta(minutes=version.number - 1)
        PolicyVersion.objects.filter(pk=version.pk).update(committed_at=since)
    views = clusters_view(fleet.workspace.project)
    slots = {(view.cluster.slug, replica.replica.name): replica.slots for view in views for replica in view.replicas}
    (late,) = slots["rollout-tokyo", "engine-3"]
    assert (late.lag_versions, late.lag_s, late.current) == (6, pytest.approx(3 * 3600, abs=60), False)
    (east,) = slots["rollout-east", "engine-1"]
    assert (east.lag_versions, east.lag_s, east.current) == (0, None, True)
    assert east.pause_s == 0.034
    totals = totals_of(views)
    assert (totals.replicas, totals.answering, totals.lent) == (7, 5, 1)
    assert totals.out == [("draining", 1), ("poisoned", 1)]
    assert (totals.slots - totals.in_step, totals.behind_versions) == (2, 6)
    assert totals.behind_s == pytest.approx(3 * 3600, abs=60)


def test_lag_is_counted_against_the_head_while_an_older_version_is_on_its_way(fleet: FleetStory) -> None:
    third = PolicyVersion.objects.get(lineage=fleet.run.lineage, number=3)
    moving = ReplicaSlot.objects.filter(replica=fleet.moving.replica)
    assert "6 versions<" in behind(fleet)
    moving.update(desired_version=third, desired_at=timezone.now() - timedelta(minutes=5))
    assert slot_view(fleet).lag_versions == 6
    moving.update(current_version=third)
    assert (slot_view(fleet).lag_versions, slot_view(fleet).current) == (3, False)
    assert "3 versions behind the head" in behind(fleet)
    moving.update(desired_source=DesiredSource.PINNED)
    assert (slot_view(fleet).lag_versions, slot_view(fleet).lag_s, slot_view(fleet).current) == (0, None, True)
    assert "in step" in behind(fleet)
    moving.update(current_version=None)
    assert (slot_view(fleet).lag_versions, slot_view(fleet).lag_s) == (None, pytest.approx(300, abs=60))


def test_the_words_say_what_lag_is_counted_against(fleet: FleetStory) -> None:
    page = text_of(client_of(fleet), reverse("clusters"))
    words = " ".join(re.sub(r"<[^>]+>", "", page[page.index("<dt>Behind</dt>") :]).split())
    told = "from the head it follows now (training head, lent), whatever older one is on its way, or else from what it"
    assert told in words
    assert "how far it is behind what it follows or should hold" in page


def behind(fleet: FleetStory) -> str:
    page = text_of(client_of(fleet), reverse("clusters"))
    row = page[page.index(f'id="replica-{fleet.moving.replica_id}"') :]
    return row[row.index('data-label="Behind"') :].split("</td>", 1)[0]


def slot_view(fleet: FleetStory) -> SlotView:
    """The slot that weights are on their way to."""
    replicas = [replica for view in clusters_view(fleet.workspace.project) for replica in view.replicas]
    (found,) = next(one.slots for one in replicas if one.replica.pk == fleet.moving.replica_id)
    return found


def test_the_chain_is_drawn_with_its_skips_and_holders(fleet: FleetStory) -> None:
    (chain,) = chains_view(fleet.workspace.project)
    assert [column.version.number for column in chain.columns] == list(range(7))
    skips = [
        (one.base, number)
        for number, column in enumerate(chain.columns)
        for one in column.deltas
        if one.publication.kind == "skip"
    ]
    assert skips == [(0, 4), (2, 6)]
    assert chain.columns[3].snapshot is not None
    held = {row.cluster: (row.hold, row.want) for row in chain.holders}
    assert held["rollout-tokyo"] == ({6: ["engine-1", "engine-2"], 0: ["engine-3"]}, {6: ["engine-3"]})
    assert held["serving-eu"][0] == {1: ["engine-1", "engine-2"]}  # each holds it in both slots
    drawing = text_of(client_of(fleet), reverse("clusters_part", args=["chains"]))
    svg = drawing[drawing.index('<svg class="chain" width') : drawing.index("</svg>")]
    assert svg.count('class="skip"') == 2
    assert svg.count('class="snapshot"') == sum(column.snapshot is not None for column in chain.columns)
    assert svg.count('class="version"') + svg.count('class="snapshot"') == 7
    assert "engine-3 should hold 0-6" in svg
    assert 'aria-label="versions 0-0 to 0-6' in svg


def test_a_delta_says_what_it_was_encoded_in_and_why(fleet: FleetStory) -> None:
    (chain,) = chains_view(fleet.workspace.project)
    version, reason = chain.columns[5].version, "1.2 s at 25 MB/s to tokyo; fast takes 1.4 s"
    version.publications.filter(kind="delta").update(profile="small", profile_reason=reason)
    client = client_of(fleet)
    assert reason in text_of(client, reverse("clusters_part", args=["chains"]))
    assert reason in text_of(client, reverse("version", args=[version.pk]))


def test_a_chain_longer_than_its_drawing_begins_where_it_is_cut(fleet: FleetStory) -> None:
    (chain,) = chains_view(fleet.workspace.project, size=4)
    assert ([column.version.number for column in chain.columns], chain.older) == ([3, 4, 5, 6], 3)
    assert [one.base for one in chain.columns[3].deltas] == [2, None]  # from 0-5, and from 0-2, which is not shown


def test_transfers_under_way_come_first_and_know_their_share(fleet: FleetStory) -> None:
    view = transfers_view(fleet.workspace.project)
    by_replica = {one.transfer.replica_id: one for one in view.moving}
    moving = by_replica[fleet.moving.replica_id]
    assert moving.share == pytest.approx(0.4)
    assert by_replica[fleet.lent.pk].share is None
    assert {transfer.state for transfer in view.over} == {TransferState.DONE}
    Transfer.objects.filter(pk=fleet.moving.pk).update(done_bytes=60_000_000)
    again = {one.transfer.pk: one.share for one in transfers_view(fleet.workspace.project).moving}
    assert again[fleet.moving.pk] == 1.0


@pytest.mark.parametrize("role", list(MemberRole))
def test_only_who_controls_the_fleet_sees_and_opens_acts(fleet: FleetStory, role: MemberRole) -> None:
    client = client_of(fleet, role)
    permitted = role in (MemberRole.OWNER, MemberRole.ENGINEER)
    page = text_of(client, reverse("clusters"))
    cluster = f'href="/clusters/{fleet.serving.pk}'
    readable = {reverse("clusters"), reverse("replica", args=[fleet.poisoned.pk])}
    for word in (f"/replicas/{fleet.lent.pk}/drain/", f"{cluster}/settings/", f"{cluster}/lending/", "data-act"):
        assert (word in page) == permitted, word
    for address in addresses(fleet):
        if address.startswith(("/replicas/", "/clusters/")) and address not in readable:
            expected = 200 if permitted else 403
            assert client.get(address).status_code == expected, address
            if not permitted:
                assert client.post(address, {"reason": "mine"}).status_code == 403, address


def test_anothers_replicas_and_clusters_do_not_exist(fleet: FleetStory) -> None:
    other = Client()
    other.force_login(make_workspace().owner)
    for address in addresses(fleet):
        if address.startswith(("/replicas/", f"/clusters/{fleet.serving.pk}")):
            assert other.get(address).status_code == 404, address
            assert other.post(address, {"reason": "mine"}).status_code in (404, 405), address
    assert fleet.serving.slug not in text_of(other, reverse("clusters"))
    assert client_of(fleet).get(reverse("clusters_part", args=["nothing"])).status_code == 404
    assert client_of(fleet).get(reverse("replica_act", args=[fleet.lent.pk, "eat"])).status_code == 404


def test_without_rows_each_part_says_what_to_do() -> None:
    workspace = make_workspace()
    client = Client()
    client.force_login(workspace.owner)
    words = {
        "regions": "No cluster yet",
        "transfers": "No transfer yet",
        "chains": "No chain of versions yet",
        "lending": "No cluster serves users",
        "planner": "No run to plan for",
    }
    assert words.keys() == PARTS.keys()
    for part, said in words.items():
        assert said in text_of(client, reverse("clusters_part", args=[part])), part


def act(story: FleetStory, replica: Replica, verb: str, **fields: object) -> int:
    address = reverse("replica_act", args=[replica.pk, verb])
    return client_of(story, MemberRole.ENGINEER).post(address, {"reason": f"because {verb}", **fields}).status_code


def test_acts_take_a_reason_that_is_kept(fleet: FleetStory) -> None:
    west = Replica.objects.get(cluster__slug="rollout-west")
    engineer = fleet.workspace.people["engineer"].username
    assert act(fleet, west, "drain", reason=" ") == 409
    for verb, fields in (
        ("drain", {}),
        ("undrain", {}),
        ("repair", {}),
        ("pin", {"slot": "default", "version": fleet.head.pk}),
        ("unpin", {"slot": "default"}),
    ):
        assert act(fleet, west, verb, **fields) == 302, verb
        kinds = (EventType.REPLICA_STEERED, EventType.REPLICA_TARGETED)
        event = Event.objects.filter(type__in=kinds, actor=engineer).latest("pk")
        assert (event.reason, event.data["replica"]) == (f"because {verb}", str(west.pk)), verb


def test_a_loan_comes_back_and_goes_out_again(fleet: FleetStory) -> None:
    assert act(fleet, fleet.lent, "return") == 302
    loan = Loan.objects.get(replica=fleet.lent)
    assert (loan.state, loan.return_reason) == (LoanState.RETURNING, "because return")
    other = fleet.serving.replicas.get(name="engine-2")
    assert act(fleet, other, "lend", run=fleet.run.pk) == 302
    assert Loan.objects.get(replica=other).reason == "because lend"


@pytest.mark.parametrize(
    ("verb", "fields", "said"),
    [
        ("pin", {"slot": "default", "version": "no"}, "choose one of the versions"),
        ("pin", {"slot": "attic"}, "choose one of the versions"),
        ("unpin", {"slot": "attic"}, "choose one of the replica"),
        ("unpin", {"slot": "default"}, "is not pinned"),
        ("undrain", {}, "is not drained"),
        ("return", {}, "is not lent"),
        ("lend", {"run": ""}, "choose one of the running runs"),
    ],
)
def test_what_cannot_be_done_is_said(fleet: FleetStory, verb: str, fields: dict[str, str], said: str) -> None:
    west = Replica.objects.get(cluster__slug="rollout-west")
    address = reverse("replica_act", args=[west.pk, verb])
    response = client_of(fleet).post(address, {"reason": "try", **fields})
    assert response.status_code == 409
    assert said in response.content.decode()


def test_a_version_of_another_project_cannot_be_pinned(fleet: FleetStory) -> None:
    strange = fleet_story(steps=1)
    assert act(fleet, fleet.lent, "pin", slot="default", version=strange.head.pk) == 409


def test_the_last_that_answers_says_so(fleet: FleetStory) -> None:
    client = client_of(fleet)
    alone = text_of(
        client, reverse("replica_act", args=[Replica.objects.get(cluster__slug="rollout-west").pk, "drain"])
    )
    assert "No other replica of the cluster answers" in alone
    assert "1 other replica of the cluster answers" in text_of(
        client, reverse("replica_act", args=[fleet.lent.pk, "drain"])
    )


LENDING = {
    "enabled": "on",
    "windows": "Sat,Sun 00:00-24:00\nMon 20:00-06:00",
    "timezone": "Asia/Tokyo",
    "source": "gateway",
    "lend_below": "1.5",
    "return_above": "4",
    "settle_s": "10 min",
    "window_s": "60",
    "prometheus_url": "",
    "prometheus_query": "",
    "keep": "1",
    "sessions": "4",
    "return_within_s": "90 s",
    "reason": "weekends are quiet",
}


def test_a_lending_policy_is_set_and_shown_again(fleet: FleetStory) -> None:
    client = client_of(fleet, MemberRole.ENGINEER)
    address = reverse("lending_settings", args=[fleet.serving.pk])
    assert client.post(address, LENDING).status_code == 302
    policy = LendingPolicy.objects.get(cluster=fleet.serving)
    assert policy.spec["windows"] == [
        {"days": [5, 6], "start": "00:00", "end": "24:00"},
        {"days": [0], "start": "20:00", "end": "06:00"},
    ]
    assert (policy.spec["settle_s"], policy.spec["return_within_s"], policy.enabled) == (600, 90, True)
    form = client.get(address).context["form"]
    assert {**form.values, "window_s": "60", "reason": LENDING["reason"], "enabled": "on"} == LENDING
    off = {name: value for name, value in LENDING.items() if name != "enabled"}
    client.post(address, off)
    policy.refresh_from_db()
    assert policy.enabled is False


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("windows", "Monday night", "line 1: write Mon,Tue"),
        ("windows", "Mon 10:00-11:00\nFunday 10:00-11:00", "line 2: 'Funday' is no day"),
        ("timezone", "Mars/Olympus", "Mars/Olympus"),
        ("return_above", "1", "lend_below must be"),
        ("lend_below", "few", "Give a number"),
        ("settle_s", "soon", "Give 90 s"),
        ("keep", "-1", "Give a whole number"),
        ("reason", " ", "Say why"),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_beside_its_field(
    fleet: FleetStory, field: str, value: str, message: str
) -> None:
    address = reverse("lending_settings", args=[fleet.serving.pk])
    response = client_of(fleet).post(address, {**LENDING, field: value})
    assert response.status_code == 422
    problems = response.context["form"].problems.by_field
    beside = "lend_below" if field == "return_above" else field
    assert message in " ".join(problems.get(beside, [])), problems
    assert LendingPolicy.objects.get(cluster=fleet.serving).spec["timezone"] == "Europe/Berlin"


def test_only_serving_clusters_lend(fleet: FleetStory) -> None:
    rollout = Cluster.objects.get(slug="rollout-west", project=fleet.workspace.project)
    assert client_of(fleet).get(reverse("lending_settings", args=[rollout.pk])).status_code == 404


def test_lending_is_forbidden_and_allowed(fleet: FleetStory) -> None:
    client = client_of(fleet)
    assert "Forbid lending" in text_of(client, reverse("lending_allow"))
    assert client.post(reverse("lending_allow"), {"reason": "a launch"}).status_code == 302
    fleet.workspace.project.refresh_from_db()
    assert fleet.workspace.project.lending_allowed is False
    assert "Allow lending" in text_of(client, reverse("lending_allow"))


SETTINGS = {
    "capacity": "96",
    "bandwidth_mbit": "200",
    "device": "H200",
    "devices": "8",
    "dollars_device_hour": "3.5",
    "reason": "a bigger link",
}


def test_a_clusters_settings_are_set(fleet: FleetStory) -> None:
    client = client_of(fleet, MemberRole.ENGINEER)
    address = reverse("cluster_settings", args=[fleet.serving.pk])
    assert client.post(address, SETTINGS).status_code == 302
    cluster = Cluster.objects.get(pk=fleet.serving.pk)
    assert (cluster.capacity, cluster.bandwidth_bytes_s, cluster.device) == (96, 25_000_000, "H200")
    assert (cluster.devices, cluster.dollars_device_hour) == (8, 3.5)
    assert Event.objects.filter(type=EventType.CLUSTER_CHANGED, reason="a bigger link").exists()
    assert client.get(address).context["form"].values == {k: v for k, v in SETTINGS.items() if k != "reason"}
    client.post(address, {**SETTINGS, "bandwidth_mbit": "", "dollars_device_hour": ""})
    cluster.refresh_from_db()
    assert (cluster.bandwidth_bytes_s, cluster.dollars_device_hour) == (None, None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("capacity", "0", "at least 1"),
        ("capacity", "many", "whole number"),
        ("bandwidth_mbit", "-5", "Mbit/s"),
        ("bandwidth_mbit", "0", "at least 1"),
        ("dollars_device_hour", "nan", "dollars"),
        ("devices", "", "whole number"),
        ("reason", "", "Say why"),
    ],
)
def test_settings_that_cannot_be_are_refused(fleet: FleetStory, field: str, value: str, message: str) -> None:
    address = reverse("cluster_settings", args=[fleet.serving.pk])
    response = client_of(fleet).post(address, {**SETTINGS, field: value})
    assert response.status_code == 422
    assert message in " ".join(response.context["form"].problems.by_field[field])


def test_queries_do_not_grow_with_replicas_and_transfers(fleet: FleetStory) -> None:
    client = client_of(fleet)

    def counts() -> dict[str, int]:
        found = {}
        for part in PARTS:
            with CaptureQueriesContext(connection) as queries:
                client.get(reverse("clusters_part", args=[part]))
            found[part] = len(queries)
        return found

    counts()  # the first look of a session asks who it is
    before = counts()
    for number in range(3):
        Replica.objects.create(cluster=fleet.serving, name=f"more-{number}", drained_at=Now(), metrics={"running": 1})
        Transfer.objects.create(replica=fleet.lent, slot="default", version=fleet.head)
    Replica.objects.filter(name="more-1").update(lease_until=Now() + Value(timedelta(seconds=30)))
    assert counts() == before
