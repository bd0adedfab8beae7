"""A step's batch as it may be trained on now: what was erased or withdrawn since it was fixed is gone."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.models import BatchItem, Feedback, Generation, Step
from controlplane.states import Consent, FeedbackState
from rl_core.types import Objective


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One trajectory of a batch, and for DPO what a person would have said instead."""

    item: BatchItem
    demonstration: str = ""


def batch_rows(step: Step) -> list[BatchRow]:
    """The batch in its order.

    A generation that was erased, or whose user no longer allows training, is left out, and so is a pair whose
    demonstration was retracted. A step that is derived again without it comes out otherwise, which opens an epoch.
    """
    items = list(step.batch.order_by("position"))
    generations = [item.generation_id for item in items if item.generation_id is not None]
    rows = Generation.objects.filter(id__in=generations, consent=Consent.TRAIN, erased_at__isnull=True)
    allowed = set(rows.values_list("id", flat=True))
    texts = _demonstrations(items)
    found = []
    for item in items:
        text = texts.get(item.feedback_id, "") if item.feedback_id else ""
        withdrawn = item.generation_id is not None and item.generation_id not in allowed
        if not withdrawn and (text or item.objective != Objective.DPO):
            found.append(BatchRow(item, text))
    return found


def _demonstrations(items: list[BatchItem]) -> dict[object, str]:
    wanted = [item.feedback_id for item in items if item.feedback_id is not None]
    rows = Feedback.objects.filter(id__in=wanted, state=FeedbackState.JOINED, consent=Consent.TRAIN)
    return dict(rows.values_list("id", "demonstration"))
