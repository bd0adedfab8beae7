"""What an oracle says of a candidate."""

from __future__ import annotations

import msgspec


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the visible and the hidden tests that pass, apart, and what the first failing one gave."""

    visible: float
    hidden: float
    first_failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything passed."""
        return self.visible == self.hidden == 1.0
