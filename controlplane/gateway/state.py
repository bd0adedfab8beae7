"""What the gateway keeps between requests: keys and routes that may be a moment old, and connections to replicas.

All of it can be lost at any time: it is made again from the database.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections import Counter
from pathlib import Path
from typing import ClassVar, Final
from weakref import WeakKeyDictionary

import structlog
from django.conf import settings

from controlplane.gateway.caches import FreshCache
from controlplane.gateway.database import in_database
from controlplane.gateway.errors import OpenAiError
from controlplane.gateway.replicas import Replicas
from controlplane.models import ApiKey
from controlplane.selectors.lane_routes import LaneRoute, lane_route
from controlplane.selectors.rollout_routes import RolloutRoute, rollout_route
from controlplane.services.rollout_sessions import key_digest, session_key
from controlplane.services.tenancy import api_key_authenticate
from rl_core.chat import ChatTokenizer
from rl_core.errors import ModelError

# A rollback reaches new requests within ROUTE_MAX_AGE_S, a revocation within KEY_MAX_AGE_S.
ROUTE_FRESH_S: Final = 0.3
ROUTE_MAX_AGE_S: Final = 1.0
KEY_FRESH_S: Final = 1.0
KEY_MAX_AGE_S: Final = 4.0
SESSION_CALLS: Final = 32  # of one session at once

RouteKey = tuple[uuid.UUID, str]
log = structlog.get_logger(__name__)


@functools.lru_cache(maxsize=16)
def tokenizer_of(folder: str) -> ChatTokenizer:
    """The tokenizer of a model folder, read once a process. Raises: ModelError."""
    tokenizer = ChatTokenizer.load(Path(folder))
    _ = tokenizer.token_strings  # built now, not in the middle of an answer
    return tokenizer


class Gateway:
    """One event loop's gateway."""

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Gateway]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.replicas = Replicas()
        self._users = 0
        self._sessions: Counter[uuid.UUID] = Counter()
        self._keys: FreshCache[str, ApiKey] = FreshCache(_load_key, fresh_s=KEY_FRESH_S, max_age_s=KEY_MAX_AGE_S)
        self._routes: FreshCache[RouteKey, LaneRoute] = FreshCache(
            _load_route, fresh_s=ROUTE_FRESH_S, max_age_s=ROUTE_MAX_AGE_S
        )
        self._rollouts: FreshCache[str, RolloutRoute] = FreshCache(
            _load_rollout_route, fresh_s=ROUTE_FRESH_S, max_age_s=ROUTE_MAX_AGE_S
        )

    @classmethod
    def here(cls) -> Gateway:
        """The running loop's gateway."""
        loop = asyncio.get_running_loop()
        if loop not in cls._of_loop:
            cls._of_loop[loop] = cls()
        return cls._of_loop[loop]

    async def key(self, token: str) -> ApiKey | None:
        """The live key of this text. Raises: OpenAiError 503."""
        return await self._keys.get(token) if token else None

    async def route(self, *, project_id: uuid.UUID, slug: str) -> LaneRoute:
        """The route of a lane. Raises: OpenAiError 404, 503."""
        return _known(await self._routes.get((project_id, slug)), slug)

    async def route_anew(self, stale: LaneRoute) -> LaneRoute:
        """The route as it is now. Raises: OpenAiError."""
        key = (stale.lane.project_id, stale.lane.slug)
        self._routes.drop(key)
        return _known(await self._routes.get(key), stale.lane.slug)

    async def rollout_route(self, key: str) -> RolloutRoute:
        """The route of the session that this key is of. Raises: OpenAiError 401, 503."""
        return _alive(await self._rollouts.get(key_digest(key)))

    async def rollout_route_anew(self, stale: RolloutRoute) -> RolloutRoute:
        """The session's route as it is now. Raises: OpenAiError."""
        digest = key_digest(session_key(stale.session_id))
        self._rollouts.drop(digest)
        return _alive(await self._rollouts.get(digest))

    def tokenizer(self, route: LaneRoute) -> ChatTokenizer:
        """The lane's tokenizer, which its route brought with it."""
        return tokenizer_of(route.lane.model.folder)

    def enter(self, session: uuid.UUID | None = None) -> None:
        """Count a request in, a user's or a session's. Sessions in training take no place of users.

        Raises: OpenAiError 429 when too many are under way.
        """
        under_way = self._users if session is None else self._sessions.total()
        full = under_way >= settings.GATEWAY_MAX_REQUESTS
        if full or (session is not None and self._sessions[session] >= SESSION_CALLS):
            raise OpenAiError(
                429, "too many requests are under way; try again", code="rate_limit_exceeded", retry_after_s=1
            )
        if session is None:
            self._users += 1
        else:
            self._sessions[session] += 1

    def leave(self, session: uuid.UUID | None = None) -> None:
        """Count it out."""
        if session is None:
            self._users -= 1
            return
        self._sessions[session] -= 1
        if not self._sessions[session]:
            del self._sessions[session]


def _known(route: LaneRoute | None, slug: str) -> LaneRoute:
    if route is None:
        raise OpenAiError(404, f"no lane {slug!r} in this project serves", code="model_not_found", param="model")
    return route


def _alive(route: RolloutRoute | None) -> RolloutRoute:
    if route is None:
        raise OpenAiError(401, "this is no key of a session that is under way", code="invalid_api_key")
    return route


async def _load_rollout_route(digest: str) -> RolloutRoute | None:
    return await in_database(_rollout_route_with_tokenizer, digest)


def _rollout_route_with_tokenizer(digest: str) -> RolloutRoute | None:
    route = rollout_route(digest)
    if route is not None:
        try:
            tokenizer_of(route.plan.model_folder)
        except ModelError as error:
            log.error("tokenizer_unreadable", session=str(route.session_id), error=str(error))
            raise OpenAiError(503, "the model's folder is not readable here", code="unavailable") from error
    return route


async def _load_key(token: str) -> ApiKey | None:
    return await in_database(api_key_authenticate, token=token)


async def _load_route(key: RouteKey) -> LaneRoute | None:
    return await in_database(_route_with_tokenizer, key)


def _route_with_tokenizer(key: RouteKey) -> LaneRoute | None:
    route = lane_route(project_id=key[0], slug=key[1])
    if route is not None:
        try:
            tokenizer_of(route.lane.model.folder)
        except ModelError as error:
            log.error("tokenizer_unreadable", lane=route.lane.slug, error=str(error))
            raise OpenAiError(503, "the lane's model folder is not readable here", code="unavailable") from error
    return route
