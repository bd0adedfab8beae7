"""Who asks when, and what is said of a cycle: over rows, without a population."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import CadenceSlot, CanaryStep, Release
from controlplane.processes.lane_demo import cycles
from controlplane.processes.lane_demo.cycles import MORE_REPLIES, MOST_REPLIES, REPLIES, Cycle
from controlplane.processes.lane_demo.report import LaneSummary, cycle_lines, summary_lines
from controlplane.processes.lane_demo.traffic import AT_ONCE, Tally
from controlplane.selectors.run_summary import Gain
from controlplane.selectors.statistics import Interval
from controlplane.states import CanaryVerdict, ReleaseState, SlotState
from tests.lane_rows import candidate_version, lane_world

pytestmark = pytest.mark.django_db

GATE = {"verdict": "pass", "difference": 0.12, "low": 0.05, "high": 0.19, "n": 64, "margin": 0.08}
BAD_GATE = {**GATE, "verdict": "inconclusive", "difference": -0.05, "low": -0.12, "high": 0.02}
ANALYSIS = {
    "effects": {"thumbs": {"difference": 0.2, "low": -0.01, "high": 0.41, "n_promoted": 38, "n_canary": 42}},
    "matured": {"promoted": 38, "canary": 42},
    "reasons": ["thumbs: not yet shown"],
}


class Rows:
    """A lane with slots in a row."""

    def __init__(self):
        self.world = lane_world()
        self.number = 0

    def slot(self, slot_state=SlotState.DONE, **release):
        self.number += 1
        made = self.release(**release) if release else None
        return CadenceSlot.objects.create(
            lane=self.world.lane,
            number=self.number,
            state=slot_state,
            due_at=timezone.now(),
            deadline_at=timezone.now() + timedelta(hours=1),
            release=made,
        )

    def release(self, *, step=None, **fields):
        version = candidate_version(self.world, root=f"{self.number:064d}")
        made = Release.objects.create(
            lane=self.world.lane, version=version, incumbent=self.world.lane.promoted_version, reason="r", **fields
        )
        if step is not None:
            CanaryStep.objects.create(release=made, position=0, share=0.5, verdict=step, analysis=ANALYSIS)
        return made


def cycle(slot, *, sabotaged=False):
    return Cycle(slot=slot, sabotaged=sabotaged, replies=320, satisfied=0.4, elapsed_s=150.0)


@pytest.fixture
def rows():
    return Rows()


def test_people_ask_while_the_slot_waits_for_signals(rows):
    opened = rows.slot(SlotState.OPEN)
    for slot in (None, opened):
        assert cycles._questions(slot, asked=0, under_way=0) == REPLIES
        assert cycles._questions(slot, asked=REPLIES, under_way=3) == 0
        assert cycles._questions(slot, asked=REPLIES, under_way=0) == MORE_REPLIES
        assert cycles._questions(slot, asked=MOST_REPLIES, under_way=0) == 0


def test_nobody_asks_while_the_machine_trains_or_evaluates(rows):
    assert cycles._questions(rows.slot(SlotState.TRAINING), asked=0, under_way=0) == 0
    gating = rows.slot(SlotState.DONE, state=ReleaseState.GATING)
    gating.state = SlotState.RELEASING
    assert cycles._questions(gating, asked=320, under_way=0) == 0


def test_people_go_on_asking_in_a_canary(rows):
    slot = rows.slot(SlotState.RELEASING, state=ReleaseState.CANARY)
    assert cycles._questions(slot, asked=320, under_way=5) == AT_ONCE - 5
    assert cycles._questions(slot, asked=320, under_way=AT_ONCE + 3) == 0


@pytest.mark.parametrize(
    ("fields", "stopped_by", "promoted"),
    [
        ({"state": ReleaseState.PROMOTED, "gate": GATE, "step": CanaryVerdict.PASS}, "", True),
        ({"state": ReleaseState.FAILED, "gate": {**BAD_GATE, "verdict": "fail"}}, "gate", False),
        ({"state": ReleaseState.SKIPPED, "gate": BAD_GATE}, "gate", False),
        ({"state": ReleaseState.ROLLED_BACK, "gate": GATE, "step": CanaryVerdict.FAIL}, "canary", False),
        ({"state": ReleaseState.SKIPPED, "gate": GATE, "step": CanaryVerdict.UNDECIDED}, "canary", False),
        ({"state": ReleaseState.SKIPPED, "gate": {}}, "", False),
        ({}, "", False),
    ],
)
def test_what_stopped_a_candidate(rows, fields, stopped_by, promoted):
    found = cycle(rows.slot(**fields))
    assert (found.stopped_by, found.promoted) == (stopped_by, promoted)


def test_a_cycle_is_said_with_its_gate_its_canary_and_its_end(rows):
    [promoted] = promoted_cycles(rows, 1)
    text = "\n".join(cycle_lines(promoted))
    assert "cycle 1\n" in text
    assert "320 replies, 40% of the incumbent's truly satisfied" in text
    assert "gate      pass: candidate − incumbent +0.120 [+0.050, +0.190] on 64 tasks, margin 0.08" in text
    assert "canary    pass at 50% of users: thumbs +0.20 [-0.01, +0.41], 38 and 42 users" in text
    assert "end       promoted  2:30" in text


def gain(low, high):
    return Gain(before=0.37, after=0.82, difference=Interval(0.45, low, high, 40))


def promoted_cycles(rows, count):
    slots = [rows.slot(state=ReleaseState.PROMOTED, gate=GATE, step=CanaryVerdict.PASS) for _ in range(count)]
    return [cycle(slot) for slot in slots]


def test_it_is_shown_with_promotions_a_stopped_sabotage_and_a_gain(rows):
    stopped = cycle(rows.slot(state=ReleaseState.SKIPPED, gate=BAD_GATE), sabotaged=True)
    summary = LaneSummary(
        cycles=[*promoted_cycles(rows, 3), stopped],
        alerts=["slot_skipped: gate inconclusive"],
        satisfaction=gain(0.4, 0.5),
        facts=gain(-0.1, 0.1),
    )
    text = "\n".join(summary_lines(summary, tally=Tally(replies=1400), elapsed_s=900))
    assert summary.shown
    assert "4 cycles in 15:00; 3 promoted without a hand" in text
    assert "0.37 → 0.82, difference +0.45 [+0.40, +0.50] (95 %)" in text
    assert "SIMULATED" in text
    assert "sabotage   cycle 1: stopped by the gate" in text
    assert "alert      slot_skipped: gate inconclusive" in text
    assert "verdict    shown: 3 of 3 cycles promoted; satisfaction rose; sabotage stopped" in text


def test_each_part_is_needed(rows):
    three = promoted_cycles(rows, 3)
    stopped = cycle(rows.slot(state=ReleaseState.SKIPPED, gate=BAD_GATE), sabotaged=True)
    let_through = cycle(three[0].slot, sabotaged=True)
    for made, satisfaction, missing in (
        (three, gain(0.4, 0.5), "sabotage not stopped"),
        ([*three, let_through], gain(0.4, 0.5), "sabotage not stopped"),
        ([*three[:2], stopped], gain(0.4, 0.5), "2 of 3 cycles promoted"),
        ([*three, stopped], gain(-0.1, 0.5), "no rise of satisfaction"),
        ([*three, stopped], None, "no rise of satisfaction"),
    ):
        summary = LaneSummary(cycles=made, satisfaction=satisfaction, facts=gain(0.0, 0.1))
        assert not summary.shown
        text = "\n".join(summary_lines(summary, tally=Tally(), elapsed_s=1))
        assert "NOT shown" in text
        assert missing in text
