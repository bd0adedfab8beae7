"""Rollouts of a run by the worker's own router, turn after turn, wherever they may go."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from django.db import connection

from controlplane.models import Run
from controlplane.selectors.rollout_plans import Need, Place, RolloutPlan, oldest_allowed, places
from rl_core.environments.session import SeedKey
from rl_core.environments.tasks import Task
from rl_core.errors import EngineBusy, EngineError, EngineUnreachable, VersionUnavailable
from rl_core.session_specs import Limits
from rl_core.types import SamplingParams, Split, VersionRef
from workers.replicas import ReplicaPool

STALENESS = 100
_PROMPT = [1, 2, 3, 4, 5, 6]


@dataclass
class Rollouts:
    """Sessions that generate without a pause while anything lets them. `tokens` counts what they got, by version."""

    run: Run
    sessions: int = 8
    tokens: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    tries: Counter[int] = field(default_factory=Counter)  # that are over, by session
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def begin(self) -> None:
        """Roll out from now on."""
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def end(self) -> None:
        """Stop. Raises what nobody should have met."""
        self._over.set()
        assert self._thread is not None
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def _live(self) -> None:
        try:
            asyncio.run(self._play())
        except BaseException as error:  # noqa: BLE001  # it is the test's
            self._error = error

    async def _play(self) -> None:
        pool = ReplicaPool()
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as database:

            async def refresh() -> VersionRef | None:
                found, oldest = await loop.run_in_executor(database, self._look)
                pool.update(found)
                return oldest

            oldest = await refresh()
            sessions = [
                asyncio.create_task(self._session(pool, lambda: oldest, number)) for number in range(self.sessions)
            ]
            while not self._over.is_set():
                await asyncio.sleep(0.3)
                oldest = await refresh()
            await asyncio.gather(*sessions)
            await pool.aclose()
            await loop.run_in_executor(database, lambda: connection.close())  # the thread's own

    def _look(self) -> tuple[list[Place], VersionRef | None]:
        return places({self.run.project_id}), oldest_allowed(self.run.lineage_id, STALENESS)

    async def _session(self, pool: ReplicaPool, oldest, number: int) -> None:  # type: ignore[no-untyped-def]
        while not self._over.is_set():
            need = Need(_plan(self.run), oldest())
            try:
                generated, _ = await pool.generate(
                    need, prefer=None, prompt_token_ids=_PROMPT, sampling=SamplingParams(max_tokens=24), session="s"
                )
            except (EngineBusy, VersionUnavailable, EngineUnreachable) as error:
                self.refused[error.code] += 1
                self.tries[number] += 1
                await asyncio.sleep(0.05)
                continue
            except EngineError as error:
                raise AssertionError(f"a rollout met {error}") from error
            for span in generated.spans:
                self.tokens[span.version] += span.end - span.start
            self.tries[number] += 1


def _plan(run: Run) -> RolloutPlan:
    return RolloutPlan(
        group_id=uuid.uuid4(),
        lineage_id=run.lineage_id,
        environment="word-problems",
        model_folder="",
        task=Task(id="t", split=Split.TRAIN, input={"question": "?"}),
        sampling=SamplingParams(),
        limits=Limits(),
        seed=SeedKey(run_seed=0, group="0", attempt=0),
        exact_version=None,
        max_staleness=STALENESS,
        cluster_slugs=frozenset(),
        project_id=run.project_id,
        run_id=run.pk,
        with_routes=False,
        rollouts=(),
    )
