"""Secrets that must be used again are kept encrypted, with a key derived from the server's secret key."""

from __future__ import annotations

import base64
import hashlib
import secrets
from functools import cache

from cryptography.fernet import Fernet
from django.conf import settings


def seal(text: str, *, purpose: str) -> str:
    """Encrypt a secret. What is sealed for one purpose does not open for another."""
    return _cipher(purpose, settings.SECRET_KEY).encrypt(text.encode()).decode()


def unseal(sealed: str, *, purpose: str) -> str:
    """The secret again. Raises: cryptography's InvalidToken when the server's secret key was changed."""
    return _cipher(purpose, settings.SECRET_KEY).decrypt(sealed.encode()).decode()


def signing_secret() -> str:
    """A fresh secret of the Standard Webhooks form."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


@cache
def _cipher(purpose: str, key: str) -> Fernet:
    digest = hashlib.sha256(f"slipway.{purpose}:{key}".encode()).digest()
    return Fernet(base64.urlsafe_b64encode(digest))
