"""Strict readers for environment variables: a value that does not parse stops the start, naming the variable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network

from django.core.exceptions import ImproperlyConfigured


class Env:
    """Reads settings from a mapping of environment variables and remembers which names it was asked for."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.names: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        """The variable's text, or the default when it is unset or empty."""
        self.names.append(name)
        return self._variables.get(name, "") or default

    def flag(self, name: str, default: bool = False) -> bool:
        """1/true/yes or 0/false/no. Raises: ImproperlyConfigured."""
        value = self.text(name).lower()
        if value in ("1", "true", "yes"):
            return True
        if value in ("0", "false", "no"):
            return False
        if value:
            raise ImproperlyConfigured(f"{name} must be 1 or 0, not {value!r}")
        return default

    def number(self, name: str, default: int) -> int:
        """A whole number. Raises: ImproperlyConfigured."""
        value = self.text(name)
        try:
            return int(value) if value else default
        except ValueError as error:
            raise ImproperlyConfigured(f"{name} must be a whole number, not {value!r}") from error

    def count(self, name: str, default: int) -> int:
        """A whole number above 0. Raises: ImproperlyConfigured."""
        found = self.number(name, default)
        if found < 1:
            raise ImproperlyConfigured(f"{name} must be a whole number above 0, not '{found}'")
        return found

    def networks(self, name: str) -> list[IPv4Network | IPv6Network]:
        """Comma-separated networks in CIDR form; none by default. Raises: ImproperlyConfigured."""
        try:
            return [ip_network(word) for word in self.words(name, [])]
        except ValueError as error:
            raise ImproperlyConfigured(f"{name} must be networks such as 10.0.0.0/8: {error}") from error

    def numbers(self, name: str, default: list[int]) -> list[int]:
        """Comma-separated whole numbers above 0; 0 alone is none of them. Raises: ImproperlyConfigured."""
        words = self.words(name, [])
        try:
            found = [int(word) for word in words]
        except ValueError as error:
            raise ImproperlyConfigured(f"{name} must be whole numbers, 8,64: {error}") from error
        if any(number < 0 for number in found):
            raise ImproperlyConfigured(f"{name} must not hold a number below 0")
        return [number for number in found if number] if words else default

    def choices(self, name: str, allowed: Iterable[str]) -> list[str]:
        """Comma-separated words of a list; none by default. Raises: ImproperlyConfigured."""
        words, known = self.words(name, []), list(allowed)
        unknown = [word for word in words if word not in known]
        if unknown:
            raise ImproperlyConfigured(f"{name} does not know {unknown[0]!r}; it may hold {', '.join(known)}")
        return words

    def words(self, name: str, default: list[str]) -> list[str]:
        """Comma-separated words."""
        value = self.text(name)
        return [word.strip() for word in value.split(",") if word.strip()] if value else default
