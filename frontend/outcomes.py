"""What a page says when a service refuses: the message beside its field, or on top."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from django.core.exceptions import PermissionDenied
from django.http import Http404

from controlplane.errors import ControlPlaneError, Forbidden, NotFound


@dataclass(slots=True)
class Problems:
    """Messages by field; `""` holds those that belong to no field."""

    by_field: dict[str, list[str]] = field(default_factory=dict)

    def add(self, message: str, name: str = "") -> None:
        """Note a message."""
        self.by_field.setdefault(name, []).append(message)

    def __bool__(self) -> bool:
        return bool(self.by_field)

    @property
    def general(self) -> list[str]:
        """Messages that belong to no field."""
        return self.by_field.get("", [])


@contextmanager
def refusals(problems: Problems, fields: dict[str, str] | None = None) -> Iterator[None]:
    """Turn a service's refusal into a message. `fields` maps the service's field names to the form's.

    Raises: Http404 and PermissionDenied for what is not there or not allowed.
    """
    try:
        yield
    except NotFound as error:
        raise Http404(error.message) from error
    except Forbidden as error:
        raise PermissionDenied(error.message) from error
    except ControlPlaneError as error:
        problems.add(error.message, (fields or {}).get(error.field, ""))
