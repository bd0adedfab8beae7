"""Signals, their map to reward, and the sources that send them."""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from controlplane.api.base import ActionView, ListView, Post, one
from controlplane.api.serializers.base import ReasonInput
from controlplane.api.serializers.feedback import (
    DetectedSignalsSerializer,
    SignalInput,
    SignalMapInput,
    SignalMapSerializer,
    SignalSerializer,
    SourceChangeInput,
    SourceInput,
    SourceKeyInput,
    SourceSecretSerializer,
    SourceSerializer,
)
from controlplane.api.serializers.tenancy import KeyCreatedSerializer
from controlplane.errors import Conflict
from controlplane.models import ApiKey, FeedbackSource, SignalDefinition, SignalMap
from controlplane.permissions import Action
from controlplane.selectors import api_lanes as select
from controlplane.services.product_events import detected_signals_define
from controlplane.services.signals import signal_define, signal_map_publish
from controlplane.services.sources import source_configure, source_create, source_key_create, source_rotate
from controlplane.states import SignalType


class SignalList(Post, ListView):
    """Signals that the project defines."""

    actions = {"GET": Action.READ, "POST": Action.RUBRICS_PUBLISH}
    serializer_class = SignalSerializer
    input_serializer = SignalInput

    def rows(self) -> QuerySet[SignalDefinition]:
        """Signals."""
        return select.signals_of(self.project)

    def perform(self, data: dict[str, Any]) -> SignalDefinition:
        """Define it."""
        kind = SignalType(data.pop("value_type"))
        try:
            with transaction.atomic():
                signal = signal_define(project=self.project, value_type=kind, **data)
        except IntegrityError as error:
            raise Conflict(f"there is a signal {data['slug']!r} already", "slug") from error
        signal.refresh_from_db()
        return signal


class SignalMapList(Post, ListView):
    """Versions of the map from signals to reward. POST publishes the next one."""

    actions = {"GET": Action.READ, "POST": Action.RUBRICS_PUBLISH}
    serializer_class = SignalMapSerializer
    input_serializer = SignalMapInput

    def rows(self) -> QuerySet[SignalMap]:
        """Maps."""
        return select.signal_maps_of(self.project)

    def perform(self, data: dict[str, Any]) -> SignalMap:
        """Publish."""
        published = signal_map_publish(
            project=self.project, content=data["content"], author=self.principal.user, actor=self.actor
        )
        published.refresh_from_db()
        return published


class DetectedSignals(ActionView):
    """Define the signals that product events are read as, those that are missing; answers with all of them."""

    actions = {"POST": Action.RUBRICS_PUBLISH}
    serializer_class = DetectedSignalsSerializer
    input_serializer = ReasonInput

    def perform(self, data: dict[str, Any]) -> dict[str, Any]:
        """Define them."""
        rows = detected_signals_define(project=self.project)
        return {"signals": SignalDefinition.objects.filter(pk__in=[row.pk for row in rows]).order_by("slug")}


class SourceList(Post, ListView):
    """Sources of feedback. POST creates one; its signing secret is shown once."""

    actions = {"GET": Action.READ, "POST": Action.LANES_MANAGE}
    serializer_class = SourceSerializer
    answer_serializer = SourceSecretSerializer
    input_serializer = SourceInput
    secret_fields = frozenset({"secret"})

    def rows(self) -> QuerySet[FeedbackSource]:
        """Sources."""
        return select.sources_of(self.project)

    def perform(self, data: dict[str, Any]) -> FeedbackSource:
        """Create it."""
        try:
            with transaction.atomic():
                source, secret = source_create(project=self.project, actor=self.actor, **data)
        except IntegrityError as error:
            raise Conflict(f"there is a source {data['slug']!r} already", "slug") from error
        return _with_secret(source, secret)


class _OfSource(ActionView):
    """Acts on the source of the path."""

    actions = {"POST": Action.LANES_MANAGE}

    def source(self) -> FeedbackSource:
        """Raises: NotFound."""
        source: FeedbackSource = one(select.sources_of(self.project), "source", slug=self.kwargs["slug"])
        return source


class SourceRotate(_OfSource):
    """A fresh signing secret; the one before stays valid until the next rotation."""

    serializer_class = SourceSecretSerializer
    input_serializer = ReasonInput
    secret_fields = frozenset({"secret"})

    def perform(self, data: dict[str, Any]) -> FeedbackSource:
        """Rotate."""
        source = self.source()
        return _with_secret(source, source_rotate(source=source, actor=self.actor, reason=data["reason"]))


class SourceConfigure(_OfSource):
    """Change a source's trust and limits, or turn it off and on."""

    serializer_class = SourceSerializer
    input_serializer = SourceChangeInput

    def perform(self, data: dict[str, Any]) -> FeedbackSource:
        """Change what is given."""
        return source_configure(source=self.source(), actor=self.actor, **data)


class SourceKeys(_OfSource):
    """A bearer key for feedback of this source, shown once; it is listed and revoked among the project's keys."""

    actions = {"POST": Action.PROJECT_MANAGE}
    serializer_class = KeyCreatedSerializer
    input_serializer = SourceKeyInput
    secret_fields = frozenset({"key"})
    success_status = 201

    def perform(self, data: dict[str, Any]) -> ApiKey:
        """Make it."""
        key, token = source_key_create(
            source=self.source(), name=data["name"], actor=self.actor, created_by=self.principal.person
        )
        key.key = token  # type: ignore[attr-defined]
        return key


def _with_secret(source: FeedbackSource, secret: str) -> FeedbackSource:
    source.refresh_from_db()
    source.secret = secret  # type: ignore[attr-defined]
    return source
