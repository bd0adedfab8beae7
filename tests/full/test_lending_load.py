"""A replica is lent and returned ten times under load: what users are answered with, and what rollouts are."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

import engine_factories as make
import httpx
import pytest
from django.db.models.functions import Now
from lending_rollouts import Rollouts
from rollback_rig import Served, _publish, served_lane

from controlplane.conductor.fleet import leases_sweep
from controlplane.conductor.lending import loans_advance
from controlplane.models import Generation, Lineage, Loan, PolicyVersion, Project, Run
from controlplane.services.lending import replica_lend, replica_return
from controlplane.states import (
    GenerationOutcome,
    LoanState,
    ReleaseState,
    RunState,
    Scope,
    StageState,
    VersionState,
    WeightSlot,
)
from rl_core.models.checkpoint import read_checkpoint
from tests.domain_factories import TESTER, make_run

pytestmark = [pytest.mark.full, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]

TIMES = 10
USERS = 6


class Users:
    """Users who ask greedily, so that their text tells which weights answered them, whatever the gateway says."""

    def __init__(self, served: Served) -> None:
        self.said: Counter[tuple[str, str]] = Counter()  # (version that the gateway names, text)
        self.turned_away: Counter[str] = Counter()
        self._served = served
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(number,)) for number in range(USERS)]
        self._errors: list[BaseException] = []

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        if self._errors:
            raise self._errors[0]

    def ask(self, web: httpx.Client, number: int) -> None:
        door = self._served.webs[number % len(self._served.webs)].url
        body = {
            "model": "assistant",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 16,
            "temperature": 0,
        }
        answer = web.post(f"{door}/v1/chat/completions", json=body, headers={"X-Slipway-User": f"user-{number}"})
        if answer.status_code != 200:
            self.turned_away[f"{answer.status_code} {answer.json()['error']['code']}"] += 1
            time.sleep(0.1)
            return
        said = answer.json()
        self.said[said["system_fingerprint"], said["choices"][0]["message"]["content"]] += 1

    def client(self) -> httpx.Client:
        key = self._served.keys[Scope.GATEWAY]
        return httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False)

    def _live(self, number: int) -> None:
        try:
            with self.client() as web:
                while not self._over.is_set():
                    self.ask(web, number)
        except BaseException as error:  # noqa: BLE001  # it is the test's
            self._errors.append(error)


def training_run(served: Served) -> Run:
    """A run of the lane's model that rolls out, allowed to borrow."""
    Project.objects.filter(pk=served.world.project.pk).update(lending_allowed=True)
    run = make_run(served.world.project)
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)
    run.stages.update(state=StageState.RUNNING)
    run.refresh_from_db()
    return run


def train(run: Run, weights: dict, number: int) -> PolicyVersion:
    """Publish the run's next version."""
    version = PolicyVersion.objects.create(
        lineage=run.lineage, epoch=0, number=number, state=VersionState.PUBLISHING, parent=run.lineage.head
    )
    _publish(version, {**weights, **make.perturbed(weights, seed=100 + number)})
    PolicyVersion.objects.filter(pk=version.pk).update(state=VersionState.COMMITTED, committed_at=Now())
    Lineage.objects.filter(pk=run.lineage_id).update(head=version)
    run.lineage.refresh_from_db()
    return version


def turn_until(served: Served, condition) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, list(Loan.objects.values())
        leases_sweep()
        loans_advance()
        served.turn()
        time.sleep(0.05)


def test_no_user_meets_a_training_version_while_a_replica_is_lent_and_returned(tmp_path, settings, test_database_url):
    state = ReleaseState.PROMOTED
    with served_lane(tmp_path, settings, test_database_url, slots=2, doors=2, state=state) as served:
        promoted = served.lane().promoted_version
        served.hold({WeightSlot.DEFAULT: promoted})
        run, weights = training_run(served), read_checkpoint(tmp_path / "model")
        users, rollouts = Users(served), Rollouts(run)
        with users.client() as web:
            users.ask(web, 0)  # what the promoted weights say, when nothing else is on the replica
        ((reference, _),) = users.said.items()
        users.begin()
        rollouts.begin()
        replica, heads = served.world.replica, []
        try:
            for number in range(TIMES):
                heads.append(train(run, weights, len(heads) + 1))
                replica_lend(replica=replica, run=run, actor=TESTER, reason="the night is quiet")
                turn_until(served, lambda: rollouts.tokens[str(heads[-1])] > 0)
                answered = sum(users.said.values())
                turn_until(served, lambda least=answered + 20: sum(users.said.values()) >= least)
                if number < 2:  # and follows what is trained meanwhile
                    heads.append(train(run, weights, len(heads) + 1))
                    turn_until(served, lambda: rollouts.tokens[str(heads[-1])] > 0)
                replica_return(replica=replica, actor=TESTER, reason="users come back")
                turn_until(served, lambda: not Loan.objects.exclude(state=LoanState.RETURNED).exists())
                assert not replica.slots.filter(current_version__lineage=run.lineage).exists()
                tried = rollouts.tries.copy()  # what was answered before the return is told by then
                turn_until(
                    served, lambda before=tried: all(rollouts.tries[n] > before[n] for n in range(rollouts.sessions))
                )
                told = sum(rollouts.tokens.values())
                served.turn_for(0.5)
                assert sum(rollouts.tokens.values()) == told  # nothing rolls out on what was returned
        finally:
            rollouts.end()
            users.end()
        sys.stderr.write(
            f"lending: {sum(users.said.values())} answers to users, turned away {dict(users.turned_away)}; "
            f"{sum(rollouts.tokens.values())} rollout tokens of {len(rollouts.tokens)} versions, "
            f"refused {dict(rollouts.refused)}\n"
        )
        assert set(users.said) == {reference}
        assert reference[0] == str(promoted)
        assert not users.turned_away
        rows = Generation.objects.filter(lane=served.world.lane)
        assert set(rows.values_list("version", "outcome")) == {(promoted.pk, GenerationOutcome.ANSWERED)}
        assert set(rollouts.tokens) == {str(head) for head in heads}
        assert Loan.objects.filter(state=LoanState.RETURNED).count() == TIMES
        assert all(loan.returned_at <= loan.return_by for loan in Loan.objects.all())
