"""Where a lane's cadence stands, for the API and the pages."""

from __future__ import annotations

from typing import Any

from controlplane.models import Lane
from controlplane.services.cadence import cadence_of, rhythm_of
from controlplane.services.slots import slot_open
from rl_core.shipping.specs import CadenceSpec


def cadence_state(lane: Lane) -> dict[str, Any]:
    """The cadence, what feedback makes of its interval, what holds it up, and the slot under way."""
    rhythm = rhythm_of(lane, cadence_of(lane) or CadenceSpec())
    return {
        "cadence": lane.cadence,
        "revision": lane.revision,
        "next_slot_at": lane.next_slot_at,
        "paused_at": lane.paused_at,
        "hold_reason": lane.hold_reason,
        "frozen_until": rhythm.frozen_until,
        "interval_s": rhythm.interval_s,
        "interval_effective_s": rhythm.interval_effective_s,
        "feedback_delay_p50_s": rhythm.delay_p50_s,
        "feedback_delay_p95_s": rhythm.delay_p95_s,
        "feedback_delays": rhythm.delays,
        "slot": slot_open(lane),
    }
