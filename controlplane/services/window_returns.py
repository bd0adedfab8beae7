"""What a candidate was trained on goes back when it ends without a verdict: no answer of a user is spent for nothing.

A version's answers are trained on from that version alone, and windows take answers of the promoted version alone. So
no line of versions ever has an answer twice, though it may be in the batches of several candidates, one after another.
"""

from __future__ import annotations

from django.db.models.functions import Now

from controlplane.models import BatchItem, Run


def window_return(*, run: Run) -> int:
    """Let a later window take what the run's batches hold of generations. Returns how many it gave back.

    Their batches stay as they were: which versions were trained on a generation is still told.
    """
    held = BatchItem.objects.filter(step__run=run, generation_id__isnull=False, returned_at__isnull=True)
    return held.update(returned_at=Now())


def returned_note(count: int) -> str:
    """The end of a sentence that says why a candidate or a slot ended."""
    return f" ({count} answers go back to the next window)" if count else ""
