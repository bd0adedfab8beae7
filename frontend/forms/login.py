"""The login form: a name and its password, and so many wrong ones a minute."""

from __future__ import annotations

import hashlib
from typing import Any

from django.contrib.auth.forms import AuthenticationForm
from django.core.exceptions import ValidationError

from controlplane.services.limits import Take, limits_take

# Wrong guesses a minute: at a name from one address, from one address at all names, at a name from everywhere.
HERE, ADDRESS, NAME = 10, 60, 120


class LoginForm(AuthenticationForm):
    """Django's form; guesses beyond the bounds are not looked at. `wait_s` says for how long, 0 when they are."""

    wait_s = 0.0

    def clean(self) -> dict[str, Any]:
        """Authenticate. Raises: ValidationError."""
        self.wait_s = max(grant.wait_s for grant in limits_take(self._takes(0)))
        if self.wait_s > 0:
            raise ValidationError("Too many wrong tries", code="throttled")
        try:
            return super().clean()
        except ValidationError:
            limits_take(self._takes(1))
            raise

    def _takes(self, guesses: int) -> list[Take]:
        address = self.request.META.get("REMOTE_ADDR", "") if self.request is not None else ""
        # What was typed as a name may be a password: only its hash goes anywhere.
        name = hashlib.sha256(str(self.cleaned_data.get("username", "")).encode()).hexdigest()[:32]
        bounds = {f"{name}:{address}": HERE, f"from:{address}": ADDRESS, f"name:{name}": NAME}
        return [Take(f"login:{bucket}", guesses, bound) for bucket, bound in bounds.items()]
