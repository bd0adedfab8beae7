"""Product events as signals: each detector by value, and the table against the union."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from rl_core.errors import SignalError
from rl_core.signals.product import DETECTORS, MAX_LATENCY_S, ProductEvent, ValueKind, detect


def read(**fields):
    return detect(msgspec.convert(fields, type=ProductEvent))


@pytest.mark.parametrize(
    ("event", "signal", "value"),
    [
        ({"kind": "edit_observed", "before": "a", "after": "a\nb", "now": "a\nb"}, "edit_persisted", 1.0),
        ({"kind": "edit_observed", "before": "a", "after": "a", "now": ""}, "edit_persisted", None),
        ({"kind": "regenerated"}, "regenerated", True),
        ({"kind": "copied", "characters": 30, "answer_characters": 120}, "copied", 0.25),
        ({"kind": "copied", "characters": 300, "answer_characters": 120}, "copied", 1.0),
        ({"kind": "decided", "accepted": False}, "accepted", False),
        ({"kind": "waited", "first_token_ms": 200, "total_ms": 1500}, "latency_s", 1.5),
        ({"kind": "waited", "first_token_ms": 0, "total_ms": 1e9}, "latency_s", MAX_LATENCY_S),
        ({"kind": "followed_up", "text": "That's wrong, undo it"}, "dissatisfied_followup", True),
        ({"kind": "followed_up", "text": "thanks"}, "dissatisfied_followup", False),
    ],
)
def test_each_kind_by_value(event, signal, value):
    detector, found = read(**event)
    assert (detector.signal, found) == (signal, value)


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "regenerated", "times": 0},
        {"kind": "copied", "characters": 1, "answer_characters": 0},
        {"kind": "copied", "characters": -1, "answer_characters": 5},
        {"kind": "waited", "first_token_ms": 2, "total_ms": 1},
        {"kind": "waited", "first_token_ms": -1, "total_ms": 1},
        {"kind": "edit_observed", "before": "", "after": "x" * 200_001, "now": ""},
    ],
)
def test_an_event_that_cannot_be_is_refused(event):
    with pytest.raises(SignalError):
        read(**event)


@pytest.mark.parametrize("event", [{"kind": "danced"}, {"kind": "regenerated", "extra": 1}, {"kind": "decided"}, {}])
def test_unknown_kinds_and_keys_are_refused(event):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(event, type=ProductEvent)


def test_every_kind_has_a_detector_of_its_own_signal():
    assert set(get_args(ProductEvent)) == set(DETECTORS)
    signals = [detector.signal for detector in DETECTORS.values()]
    assert len(set(signals)) == len(signals)
    assert all(d.value is not ValueKind.NUMBER or d.minimum < d.maximum for d in DETECTORS.values())
