"""What all models share."""

from __future__ import annotations

import uuid

import uuid_utils.compat
from django.db import models
from django.db.models.functions import Now


def new_id() -> uuid.UUID:
    """A time-ordered id (UUIDv7)."""
    return uuid_utils.compat.uuid7()


class Entity(models.Model):
    """A row with a time-ordered id and the database's time of creation."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        abstract = True
