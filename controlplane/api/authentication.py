"""Bearer API keys. Sessions are REST framework's own, with CSRF."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import AnonymousUser
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from controlplane.models import ApiKey, User
from controlplane.principals import Principal
from controlplane.services.tenancy import api_key_authenticate

SCHEME = b"bearer"


class ApiKeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer slw_<prefix>_<secret>`. `request.auth` is the key; there is no user."""

    def authenticate(self, request: Request) -> tuple[AnonymousUser, ApiKey] | None:
        """The key of the header; None without one, so that the session may speak. Raises: AuthenticationFailed."""
        parts = get_authorization_header(request).split()
        if not parts:
            return None
        if len(parts) != 2 or parts[0].lower() != SCHEME:
            raise AuthenticationFailed("send `Authorization: Bearer <key>`")
        key = api_key_authenticate(token=parts[1].decode("latin1"))
        if key is None:
            raise AuthenticationFailed("the key is unknown, expired or revoked")
        return AnonymousUser(), key

    def authenticate_header(self, request: Request) -> str:
        """What a 401 asks for."""
        return 'Bearer realm="slipway"'


def principal_of(request: Request) -> Principal | None:
    """The caller of a REST framework request, or None when nobody authenticated."""
    if isinstance(request.auth, ApiKey):
        return Principal(key=request.auth)
    user: Any = request.user
    return Principal(user=user) if isinstance(user, User) else None


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """How the OpenAPI document shows it."""

    target_class = "controlplane.api.authentication.ApiKeyAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        """A bearer scheme."""
        return {"type": "http", "scheme": "bearer", "bearerFormat": "slw_<prefix>_<secret>"}
