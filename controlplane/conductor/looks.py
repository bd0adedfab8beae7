"""Looking at many rows, each by itself: what one of them meets must not keep the others from being looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import structlog
from django.db import InterfaceError, OperationalError
from psycopg.errors import DeadlockDetected

from controlplane.errors import ControlPlaneError
from rl_core.errors import RlCoreError

log = structlog.get_logger(__name__)

PAUSE_S = 10.0


class Looks:
    """Looks at rows of one kind. A row that met a bug is left alone for `pause_s`, with one traceback."""

    def __init__(self, what: str, *, pause_s: float = PAUSE_S) -> None:
        self._what = what
        self._pause_s = pause_s
        self._not_before: dict[Hashable, float] = {}

    def at(self, row: Hashable, look: Callable[[], object]) -> bool:
        """Look at one row; whether that went well.

        Raises: OperationalError, InterfaceError: the database is away, for all of them.
        """
        if time.monotonic() < self._not_before.get(row, 0.0):
            return False
        self._not_before.pop(row, None)
        try:
            look()
        except (OperationalError, InterfaceError) as error:
            if not isinstance(error.__cause__, DeadlockDetected):
                raise
            log.warning("look_refused", what=self._what, row=str(row), error=str(error)[:300])
        except (ControlPlaneError, RlCoreError) as error:  # it moved meanwhile: the next look decides again
            log.info("look_refused", what=self._what, row=str(row), error=str(error)[:300])
        except Exception:
            log.exception("look_failed", what=self._what, row=str(row), again_in_s=self._pause_s)
            self._not_before[row] = time.monotonic() + self._pause_s
        else:
            return True
        return False
