"""Nothing that is sent to the endpoints for events is answered with a 5xx, and nothing wrong is stored."""

from __future__ import annotations

import http.client
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from django.test import Client

from controlplane.models import Feedback, RejectedPayload
from controlplane.services.events import SYSTEM
from controlplane.services.product_events import detected_signals_define
from controlplane.services.rejections import KEPT
from controlplane.services.sources import source_create
from controlplane.services.tenancy import api_key_create
from controlplane.states import Scope
from rl_core.store import open_store
from tests.controlplane.api.hostile_requests import hostile_requests
from tests.controlplane.api.web_process import serving
from tests.lane_rows import ACTOR, lane_world

EXPECTED = {200, 201, 202, 207, 400, 401, 404, 409, 413, 415, 422}
FULL, THREADS = 10_000, 4


class Attacked:
    """A project with everything that the requests are about."""

    def __init__(self, tmp_path):
        self.world = lane_world()
        detected_signals_define(project=self.world.project)
        rates = {"rate_per_minute": 10**8, "actor_rate_per_minute": 10**8}
        slug = f"s-{uuid.uuid4().hex[:8]}"
        source, secret = source_create(project=self.world.project, slug=slug, actor=ACTOR, **rates)
        _, key = api_key_create(
            project=self.world.project, name="app", scopes=[Scope.FEEDBACK], actor=SYSTEM, source=source
        )
        generation = self.world.generate(open_store(str(tmp_path)))
        self.known = {"key": key, "source": slug, "secret": secret, "generation_id": generation.id}

    def requests(self, *, seed, count):
        return hostile_requests(seed=seed, count=count, **self.known)

    def nothing_odd_is_stored(self):
        """Every stored event reads back, and the inbox kept to its bounds."""
        rows = list(Feedback.objects.filter(project=self.world.project).select_related("signal"))
        assert rows
        assert all(1999 < row.occurred_at.year < 2100 for row in rows)
        assert 0 < RejectedPayload.objects.filter(project=self.world.project).count() <= KEPT


def statuses_of(requests, send):
    found = Counter()
    for request in requests:
        status, answer = send(request)
        found[status] += 1
        assert status < 500, (status, answer[:300], request.path, request.headers, request.body[:500])
        assert status in EXPECTED, (status, answer[:300], request)
    return found


@pytest.mark.django_db
def test_no_request_is_answered_with_a_5xx(tmp_path):
    attacked, client = Attacked(tmp_path), Client(raise_request_exception=False)

    def send(request):
        headers = {name: value for name, value in request.headers.items() if name != "Content-Type"}
        media = request.headers["Content-Type"]
        answer = client.generic("POST", request.path, request.body, content_type=media, headers=headers)
        return answer.status_code, answer.content

    found = statuses_of(attacked.requests(seed=1, count=700), send)
    assert found[207] > 50
    assert found[422] > 50
    assert found[400] > 10
    attacked.nothing_odd_is_stored()


@pytest.mark.drill
@pytest.mark.timeout(1500)
def test_ten_thousand_requests_over_the_wire(test_database_url, tmp_path):
    attacked = Attacked(tmp_path)

    def attack(seed, where):
        connection = http.client.HTTPConnection(where, timeout=60)

        def send(request):
            headers = {name: value.encode("latin-1") for name, value in request.headers.items()}
            connection.request("POST", request.path, body=request.body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

        return statuses_of(attacked.requests(seed=seed, count=FULL // THREADS), send)

    with serving(test_database_url, log=tmp_path / "web.log") as url, ThreadPoolExecutor(THREADS) as pool:
        totals = sum(pool.map(attack, range(THREADS), [urlsplit(url).netloc] * THREADS), Counter())
    assert sum(totals.values()) == FULL, totals
    assert {200, 201, 202, 207, 400, 401, 404, 413, 415, 422} <= set(totals), totals
    assert "Traceback" not in (tmp_path / "web.log").read_text(errors="replace")
    attacked.nothing_odd_is_stored()
