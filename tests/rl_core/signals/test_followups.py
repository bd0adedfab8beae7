"""The reader of follow-ups, by example, and measured on the labelled set that is shipped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_core.errors import JudgeFailed, SignalError
from rl_core.signals.__main__ import LABELLED_SET, main
from rl_core.signals.followups import FollowUp, read_followup
from rl_core.signals.measure import LabelledFollowUp, agreement, labelled_read, share_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "previous", "expected"),
    [
        ("No, that's not what I asked for.", "", ("refusal", "not asked", "told you")),
        ("Center the submit button please", "Center the submit button", ("asked again",)),
        ("thanks, now add a test", "", ("thanks",)),
        ("", "", ()),
    ],
)
def test_the_cues_are_named(text, previous, expected):
    assert read_followup(text, previous=previous).cues == expected


def test_scores_add_up_to_a_verdict():
    assert read_followup("You broke the login test.").dissatisfied
    assert not read_followup("Thanks! Does it also work on Windows?").dissatisfied
    assert FollowUp(1.0, ()).dissatisfied
    assert not FollowUp(0.99, ()).dissatisfied


def test_a_question_of_one_word_is_not_asked_again():
    assert "asked again" not in read_followup("continue", previous="continue").cues


@pytest.mark.parametrize("piece", ["put ", "still ", "you ", "no ", "and so ok ", "why is ", "!?", " ", "don't "])
def test_hostile_texts_are_read_in_bounded_time(piece):
    started = time.process_time()
    read_followup(piece * 100_000, previous=piece * 100_000)
    assert time.process_time() - started < 5


def test_the_shipped_set_is_balanced_and_has_no_line_twice():
    rows = labelled_read(ROOT / LABELLED_SET)
    assert len({(row.text, row.previous) for row in rows}) == len(rows) >= 300
    for split in ("development", "held_out"):
        labels = [row.dissatisfied for row in rows if row.split == split]
        assert len(labels) >= 120
        assert 0.4 < sum(labels) / len(labels) < 0.6


def test_precision_and_recall_on_lines_that_were_not_seen():
    """Floors below what was measured (0.91 and 0.88): a change of the patterns that loses much is noticed."""
    done = subprocess.run(
        [sys.executable, "-m", "rl_core.signals", "measure"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    held_out = json.loads(done.stdout)["patterns"]["held_out"]
    assert held_out["precision"]["value"] >= 0.88
    assert held_out["recall"]["value"] >= 0.82
    assert held_out["precision"]["low"] < held_out["precision"]["value"] < held_out["precision"]["high"]


def rows_of(*labels: bool) -> list[LabelledFollowUp]:
    return [LabelledFollowUp(str(number), "", label, "held_out") for number, label in enumerate(labels)]


def test_agreement_is_counted_by_value():
    said = {"0": True, "1": True, "2": True, "3": False, "4": False}
    found = agreement(rows_of(True, True, False, True, False), lambda row: said[row.text])
    assert (found.n, found.positives, found.failed) == (5, 3, 0)
    assert found.precision is not None
    assert found.recall is not None
    assert (found.precision.value, found.recall.value) == (2 / 3, 2 / 3)


def test_a_failed_judge_is_counted_and_never_a_verdict():
    def fails(row: LabelledFollowUp) -> bool:
        raise JudgeFailed("away")

    found = agreement(rows_of(True, False), fails)
    assert (found.failed, found.precision, found.recall) == (2, None, None)


def test_wilsons_interval():
    """8 of 10: (0.4902, 0.9433), as every table has it."""
    share = share_of(8, 10)
    assert share is not None
    assert (round(share.low, 4), round(share.high, 4)) == (0.4902, 0.9433)


def test_a_set_that_does_not_read_names_its_line(tmp_path, capsys):
    path = tmp_path / "set.jsonl"
    path.write_text('{"text":"a","previous":"","dissatisfied":true,"split":"x"}\n{"text":1}\n')
    with pytest.raises(SignalError, match="line 2"):
        labelled_read(path)
    assert main(["measure", "--set", str(path)]) == 1
    assert "line 2" in capsys.readouterr().err
