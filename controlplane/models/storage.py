"""What the object store holds that no row needs."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Garbage(models.Model):
    """An object that nothing needed when it was marked. It is deleted once the mark is older than the grace period.

    Whoever wants to name an object that may stand already removes its mark first, see `controlplane.services.blobs`:
    a collector deletes an object only while it holds the lock of its mark.
    """

    key = models.CharField(max_length=900, primary_key=True)
    bytes = models.BigIntegerField()
    reason = models.CharField(max_length=200)
    marked_at = models.DateTimeField(db_default=Now())

    class Meta:
        indexes = [models.Index(fields=["marked_at"], name="garbage_marked_at")]

    def __str__(self) -> str:
        return self.key
