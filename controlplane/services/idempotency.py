"""Answers that are kept for repeated calls, and for how long."""

from __future__ import annotations

from datetime import timedelta

from django.db.models.functions import Now

from controlplane.models import IdempotencyRecord

KEPT = timedelta(hours=24)


def idempotency_age() -> int:
    """Forget answers that are older than that; how many. A key used again after that time drops its own."""
    deleted, _ = IdempotencyRecord.objects.filter(created_at__lt=Now() - KEPT).delete()
    return deleted
