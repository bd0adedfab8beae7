"""Graders beside the world: where they may be, with which secret they are asked, and that their answers are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from rl_core import destinations
from rl_core.destinations import Reach
from rl_core.errors import DestinationRefused, DestinationUnreached, GraderFailed, GraderRefused

MAX_ANSWER_BYTES = 64 * 1024
_LATER = {408, 425, 429}


class Secret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A secret that rubrics name. It goes to `origin` (scheme, host, port) alone, whoever names it.

    `projects` are the slugs of those whose rubrics may name it; empty for all.
    """

    value: str
    origin: str
    projects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outside:
    """What graders may reach. Without one, the public internet and no secrets."""

    reach: Reach = field(default_factory=lambda: Reach(setting="GRADER_NETWORKS"))
    secrets: Mapping[str, Secret] = field(default_factory=dict)

    def secret(self, name: str, url: str) -> str:
        """The secret's value, or nothing where no name is given. Raises: GraderRefused."""
        if not name:
            return ""
        secret = self.secrets.get(name)
        if secret is None:
            raise GraderRefused(f"there is no grader secret named {name[:40]!r}; the operator adds it (GRADER_SECRETS)")
        if _origin(url) != _origin(secret.origin):
            raise GraderRefused(f"the grader secret {name!r} is for {secret.origin}, not for where the rubric sends it")
        return secret.value

    async def ask(self, url: str, *, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
        """Post, and return the body of a 200. Raises: GraderFailed, GraderRefused."""
        try:
            async with asyncio.timeout(timeout_s):
                destination = await asyncio.to_thread(self.reach.resolve, url)
            answer = await destinations.post(
                destination, body=body, headers=headers, timeout_s=timeout_s, max_bytes=MAX_ANSWER_BYTES
            )
        except DestinationRefused as error:
            raise GraderRefused(f"the grader cannot be asked: {error}") from error
        except (DestinationUnreached, TimeoutError) as error:
            raise GraderFailed(f"the grader gave no answer: {error or 'its name did not resolve in time'}") from error
        if answer.status == 200:
            return answer.body
        said = answer.body[:200]
        for secret in self.secrets.values():  # some say what they were asked with
            said = said.replace(secret.value.encode(), b"(secret)") if secret.value else said
        what = f"the grader at {destination.host} answered {answer.status}: {said!r}"
        raise GraderFailed(what) if answer.status >= 500 or answer.status in _LATER else GraderRefused(what)


def check_secrets(secrets: Mapping[str, Secret]) -> None:
    """Raises: ValueError for an origin that is none."""
    for name, secret in secrets.items():
        scheme, host, _ = _origin(secret.origin)
        if scheme not in ("http", "https") or not host or urlsplit(secret.origin).path not in ("", "/"):
            raise ValueError(f"{name}: origin must be like https://api.example.com, not {secret.origin!r}")


def _origin(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 0)
    except ValueError as error:
        raise GraderRefused("the url of the grader does not parse") from error
    return parts.scheme, parts.hostname or "", port
