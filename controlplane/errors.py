"""Errors of the control plane, each with a code, an HTTP status and whether a retry may help.

ControlPlaneError
├── Malformed             400
├── NotFound              404
├── Forbidden             403
├── Conflict              409  a state does not allow the change, or a compare-and-set lost
│   ├── IllegalTransition
│   └── StaleFence        a result carries an older fence than the unit's
├── StaleRevision         412  expected_revision is not the present one
├── Invalid               422  the request is well-formed and wrong
├── Gone                  410
├── TooLarge              413
├── UnsupportedMediaType  415
├── RangeRefused          416  the bytes asked for lie outside the file
├── Throttled             429
└── Unavailable           503  a part that is needed does not answer

They are translated in two places: the API's exception handler and the task base.
"""

from __future__ import annotations

from typing import ClassVar


class ControlPlaneError(Exception):
    """Base of the tree. `field` names the offending input where there is one."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class Malformed(ControlPlaneError):
    """The body is not what its media type says."""

    code = "malformed"
    http_status = 400


class NotFound(ControlPlaneError):
    """Nothing of that name is visible to the caller."""

    code = "not_found"
    http_status = 404


class Forbidden(ControlPlaneError):
    """The caller may not do this."""

    code = "forbidden"
    http_status = 403


class Conflict(ControlPlaneError):
    """The present state does not allow the change."""

    code = "conflict"
    http_status = 409


class IllegalTransition(Conflict):
    """The state machine has no such change from the present state."""

    code = "illegal_transition"


class StaleFence(Conflict):
    """The result belongs to an attempt that is no longer the newest."""

    code = "stale_fence"


class StaleRevision(ControlPlaneError):
    """The caller acted on an older revision than the present one."""

    code = "stale_revision"
    http_status = 412


class Invalid(ControlPlaneError):
    """The request is well-formed and wrong."""

    code = "invalid"
    http_status = 422


class Gone(ControlPlaneError):
    """The target was erased, or its source disabled."""

    code = "gone"
    http_status = 410


class TooLarge(ControlPlaneError):
    """The body is over its limit."""

    code = "too_large"
    http_status = 413


class UnsupportedMediaType(ControlPlaneError):
    """The body is of another media type than the endpoint takes."""

    code = "unsupported_media_type"
    http_status = 415


class RangeRefused(ControlPlaneError):
    """The range of bytes lies outside the file."""

    code = "range_refused"
    http_status = 416


class Throttled(ControlPlaneError):
    """Too many requests; `wait` seconds (the answer's `Retry-After`) until there is room again."""

    code = "throttled"
    http_status = 429
    retryable = True

    def __init__(self, message: str, field: str = "", *, wait: float = 0.0) -> None:
        super().__init__(message, field)
        self.wait = wait


class Unavailable(ControlPlaneError):
    """A part that is needed does not answer."""

    code = "unavailable"
    http_status = 503
    retryable = True
