"""From a request to a replica that holds the lane's version, and back, with the generation recorded."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from controlplane.gateway.openai import ChatRequest, OpenAiError
from controlplane.models import Generation, Lane, PolicyVersion, Project, ReplicaSlot, new_id
from controlplane.services.generations import Answer, generation_record
from controlplane.states import Consent, ReplicaState
from rl_core.chat import ChatTokenizer
from rl_core.engines.client import EngineClient
from rl_core.errors import EngineBusy, EngineError, ModelError, RequestRefused
from rl_core.store import open_store
from rl_core.types import Generated, VersionRef


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request of the lane may go: the promoted version and the replica slots that hold it."""

    lane: Lane
    version: PolicyVersion
    slots: list[ReplicaSlot]


@functools.lru_cache(maxsize=16)
def tokenizer_of(folder: str) -> ChatTokenizer:
    """The tokenizer of a model folder, read once a process."""
    return ChatTokenizer.load(Path(folder))


def lane_route(*, project: Project, model: str) -> Route:
    """The lane named by `model`, and its ready replicas. Raises: OpenAiError 404, or 503 when none is ready."""
    lanes = Lane.objects.select_related("promoted_version", "project", "model", "cluster")
    lane = lanes.filter(project=project, slug=model).first()
    if lane is None or lane.promoted_version is None:
        raise OpenAiError(404, f"no lane {model!r} in this project", code="model_not_found", param="model")
    holding = ReplicaSlot.objects.filter(
        replica__cluster=lane.cluster,
        current_version=lane.promoted_version,
        replica__state__in=(ReplicaState.READY, ReplicaState.RECONCILING),
    )
    slots = list(holding.select_related("replica").order_by("replica_id"))
    if not slots:
        raise OpenAiError(
            503, f"no replica of lane {model!r} holds its version yet", code="no_replica", retry_after_s=2
        )
    return Route(lane, lane.promoted_version, slots)


def prompt_of(*, route: Route, request: ChatRequest) -> tuple[list[dict[str, str]], list[int]]:
    """Messages with the lane's system prompt, and their tokens. Raises: OpenAiError 400."""
    messages = [message.plain() for message in request.messages]
    if route.lane.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": route.lane.system_prompt}, *messages]
    try:
        return messages, tokenizer_of(route.lane.model.folder).render(messages)
    except ModelError as error:
        raise OpenAiError(400, str(error), code="invalid_value", param="messages") from error


async def generate(*, route: Route, prompt: list[int], request: ChatRequest) -> Generated:
    """Ask the lane's replicas in turn: the next is tried when one is busy or gone. Raises: OpenAiError."""
    busy: EngineError | None = None
    version: VersionRef = route.version.ref
    for slot in route.slots:
        token = (settings.REPLICA_TOKEN_DIR / f"{slot.replica_id}.inference").read_text().strip()
        client = EngineClient(slot.replica.inference_url, token)
        try:
            return await client.generate(prompt, request.sampling(), exact_version=version, slot=slot.slot)
        except RequestRefused as error:
            raise OpenAiError(400, str(error), code="invalid_value") from error
        except EngineError as error:
            busy = error
        finally:
            await client.aclose()
    if isinstance(busy, EngineBusy):
        raise OpenAiError(429, "every replica's queue is full", code="rate_limit_exceeded", retry_after_s=1) from busy
    raise OpenAiError(503, "no replica answered", code="no_replica", retry_after_s=2) from busy


def record(
    *,
    route: Route,
    messages: list[dict[str, str]],
    prompt: list[int],
    generated: Generated,
    request: ChatRequest,
    started_s: float,
    user_key: str,
    session: str,
    consent: Consent,
) -> Generation:
    """Keep the generation, as far as consent goes."""
    answer = Answer(
        generation_id=new_id(),
        messages=messages,
        prompt_token_ids=prompt,
        generated=generated,
        sampling=request.sampling(),
        latency_ms=(time.perf_counter() - started_s) * 1000,
    )
    return generation_record(
        lane=route.lane,
        version=route.version,
        answer=answer,
        user_key=user_key,
        session=session,
        consent=consent,
        store=open_store(settings.STORE_URL),
    )
