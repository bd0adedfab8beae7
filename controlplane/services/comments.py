"""Texts of feedback: kept as far as consent goes, without what the project's lanes redact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog

from controlplane.services.payloads import FeedbackPayload
from controlplane.services.redaction import RedactionFailed, Redactor
from controlplane.states import Consent

log = structlog.get_logger(__name__)


class KeptText(NamedTuple):
    """What of an event's texts is written down."""

    comment: str
    demonstration: str
    tags: dict[str, str]


class Texts:
    """Decides what of each text is kept. `redactions` are those of all lanes of the project.

    Feedback may come before its generation, so what any lane of the project redacts is redacted. Where redacting fails
    nothing is kept. A demonstration that was changed is none any more: it would be trained on.
    """

    def __init__(self, redactions: Sequence[Mapping[str, str]]) -> None:
        self._redactions = redactions

    def kept(self, payload: FeedbackPayload, consent: Consent) -> KeptText:
        """The texts of one event."""
        demonstration = payload.demonstration or ""
        if consent == Consent.NONE:
            return KeptText("", "", {})
        if not self._redactions:
            return KeptText(payload.comment, demonstration, payload.tags)
        try:
            tags = {self._redacted(key): self._redacted(value) for key, value in payload.tags.items()}
            untouched = self._redacted(demonstration) == demonstration
            return KeptText(self._redacted(payload.comment), demonstration if untouched else "", tags)
        except RedactionFailed as error:
            log.warning("texts_not_kept", reason=str(error))
            return KeptText("", "", {})

    def _redacted(self, text: str) -> str:
        for redactions in self._redactions if text else ():
            text = Redactor(redactions).text(text)
        return text
