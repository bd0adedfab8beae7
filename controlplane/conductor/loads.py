"""How busy users keep a serving cluster: by what our gateway counts and engines tell, or by a Prometheus query."""

from __future__ import annotations

import asyncio
import math
import uuid
from datetime import timedelta
from typing import Final
from urllib.parse import urlencode

import msgspec
from django.conf import settings

from controlplane.errors import Unavailable
from controlplane.models import Cluster, Generation, Replica
from controlplane.selectors.answering import answering
from controlplane.services.clock import database_now
from controlplane.services.loans import loans_open
from controlplane.services.replica_reports import requests_in
from rl_core.destinations import Reach, post
from rl_core.errors import AnswerTooLarge, DestinationRefused, DestinationUnreached
from rl_core.lending import LendingSpec, LoadSource

TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 64 * 1024
_CLOCKS_APART_S: Final = 600.0  # of the gateway's machines and the database's, at most; answers take a while, too
_FORM: Final = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}


class _Sample(msgspec.Struct):
    value: tuple[float, str]


class _Data(msgspec.Struct):
    resultType: str  # noqa: N815
    result: list[_Sample | float | str]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


def load_of(cluster: Cluster, spec: LendingSpec) -> float:
    """The load in its source's unit. Raises: Unavailable, saying why it is not known."""
    if spec.source is LoadSource.PROMETHEUS:
        return prometheus_load(spec.prometheus_url, spec.prometheus_query)
    return gateway_load(cluster, window_s=spec.window_s)


def gateway_load(cluster: Cluster, *, window_s: float) -> float:
    """Users' requests that were under way in the last `window_s` seconds, a second, for each replica that answers:
    those whose answer ended by the database's clock, and those that ran or waited at the last look at the replicas.

    What a replica is lent for is not counted. Raises: Unavailable when no replica answers.
    """
    replicas = list(Replica.objects.filter(answering(), cluster=cluster))
    if not replicas:
        raise Unavailable(f"no replica of {cluster.slug} answers")
    since = database_now() - timedelta(seconds=window_s)
    # Ids begin with the time at which the gateway made them: the few that can be young are found by their index.
    oldest = uuid.UUID(int=int((since.timestamp() - _CLOCKS_APART_S) * 1000) << 80)
    recent = Generation.objects.filter(id__gte=oldest, created_at__gte=since)
    requests = recent.filter(lane__cluster=cluster).count() + _under_way(replicas)
    return requests / window_s / len(replicas)


def _under_way(replicas: list[Replica]) -> float:
    """Requests that replicas told of at the last look, but for those in lent slots."""
    lent = {loan.replica_id: loan.slot for loan in loans_open().filter(replica__in=replicas)}
    told = sum(requests_in(replica.metrics) for replica in replicas)
    return told - sum(requests_in(replica.metrics, lent[replica.pk]) for replica in replicas if replica.pk in lent)


def prometheus_load(url: str, query: str) -> float:
    """The one number that an instant query gives. Raises: Unavailable."""
    try:
        reach = Reach(settings.METRICS_NETWORKS, "METRICS_NETWORKS")
        destination = reach.resolve(f"{url.rstrip('/')}/api/v1/query")
        body = urlencode({"query": query, "timeout": f"{TIMEOUT_S:g}s"}).encode()
        answer = asyncio.run(post(destination, body=body, headers=_FORM, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES))
    except (DestinationRefused, DestinationUnreached, AnswerTooLarge) as error:
        raise Unavailable(f"Prometheus: {error}") from error
    return prometheus_number(answer.status, answer.body)


def prometheus_number(status: int, body: bytes) -> float:
    """The one number in an answer to an instant query. Raises: Unavailable for any other answer."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"Prometheus answered {status} with something that does not read: {error}") from error
    if answer.status != "success" or answer.data is None:
        raise Unavailable(f"Prometheus answered {status}: {answer.error[:200] or answer.status[:50]}")
    result = answer.data.result
    text: object = None
    if answer.data.resultType == "scalar" and len(result) == 2:
        text = result[1]
    elif answer.data.resultType == "vector" and len(result) == 1 and isinstance(result[0], _Sample):
        text = result[0].value[1]
    if not isinstance(text, str):
        what = f"a {answer.data.resultType[:20]} of {len(result)}"
        raise Unavailable(f"the query must give one number, not {what}: sum it up")
    try:
        number = float(text)
    except ValueError as error:
        raise Unavailable(f"the query gave {text[:50]!r}, not a number") from error
    if not math.isfinite(number):
        raise Unavailable(f"the query gave {text[:50]}: no number to compare with")
    return number
