"""Where alerts may go, as `rl_core.destinations` has it: the public internet, and `ALERT_HOOK_NETWORKS`."""

from __future__ import annotations

from django.conf import settings

from controlplane.errors import Invalid, Unavailable
from rl_core.destinations import Destination, Reach
from rl_core.errors import DestinationRefused, DestinationUnreached


def destination_check(url: str) -> tuple[str, int]:
    """Host and port of a URL whose form is allowed; nothing is resolved. Raises: Invalid, saying why it is not."""
    try:
        return _reach().check(url)
    except DestinationRefused as error:
        raise Invalid(str(error), field="url") from error


def destination_resolve(url: str) -> Destination:
    """The address to connect to. Raises: Invalid when any address of the name is not allowed; Unavailable."""
    try:
        return _reach().resolve(url)
    except DestinationRefused as error:
        raise Invalid(str(error), field="url") from error
    except DestinationUnreached as error:
        raise Unavailable(str(error)) from error


def _reach() -> Reach:
    return Reach(settings.ALERT_HOOK_NETWORKS, "ALERT_HOOK_NETWORKS")
