"""Background requests give way to foreground ones: in the queue of a slot, and between the slots of an engine."""

from __future__ import annotations

import time
from pathlib import Path

import engine_factories as make
import pytest

from rl_core.engines.engine import Engine
from rl_core.engines.precedence import GIVE_WAY_S
from rl_core.engines.request import ActiveSequence, Request
from rl_core.engines.waiting import Waiting
from rl_core.errors import EngineBusy
from rl_core.types import SamplingParams

USERS, ROLLOUTS = "default", "candidate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.endless_model_folder(tmp_path_factory.mktemp("background") / "tiny")


def engine_of(folder: Path) -> Engine:
    return make.make_engine(folder, slots=(USERS, ROLLOUTS), max_len=400)


def submit(engine: Engine, slot: str, *, tokens: int, background: bool, seed: int = 0, on_token=None):  # type: ignore[no-untyped-def]
    prompt = make.random_prompt(8, seed=seed)
    sampling = SamplingParams(max_tokens=tokens, seed=seed)
    request = Request(prompt=prompt, sampling=sampling, background=background)
    return engine.submit(request, slot=slot, on_token=on_token)


def steps(engine: Engine, slot: str) -> float:
    return engine.snapshot()[slot]["decode_steps_total"]


def test_a_slot_of_rollouts_stands_while_another_answers_users(folder: Path) -> None:
    engine = engine_of(folder)
    rollouts = [submit(engine, ROLLOUTS, tokens=380, background=True, seed=n) for n in range(4)]
    make.wait_until(lambda: steps(engine, ROLLOUTS) > 5)
    seen: list[tuple[float, float]] = []
    user = submit(
        engine, USERS, tokens=120, background=False,
        on_token=lambda _: seen.append((time.monotonic(), steps(engine, ROLLOUTS))),
    )  # fmt: skip
    user.future.result(60)
    (began, before), (ended, after) = seen[0], seen[-1]
    assert len(seen) > 20  # users were answered at length
    # A step that had begun, one for each turn that was waited for in full, and one at the edge.
    assert after - before <= 2 + (ended - began) / GIVE_WAY_S
    for rollout in rollouts:
        assert rollout.future.result(60).token_ids  # and went on afterwards
    assert steps(engine, ROLLOUTS) > after
    engine.close()


def test_two_slots_of_users_do_not_wait_for_each_other(folder: Path) -> None:
    engine = engine_of(folder)
    first = submit(engine, ROLLOUTS, tokens=380, background=False)
    make.wait_until(lambda: steps(engine, ROLLOUTS) > 2)
    before = steps(engine, ROLLOUTS)
    submit(engine, USERS, tokens=120, background=False).future.result(60)
    assert steps(engine, ROLLOUTS) - before > 20 or first.future.done()
    engine.close()


def test_background_goes_on_once_users_left_in_whatever_way(folder: Path) -> None:
    engine = engine_of(folder)
    user = submit(engine, USERS, tokens=380, background=False)
    make.wait_until(lambda: user.sampled > 2)
    engine.abort(user, slot=USERS)
    user.future.result(60)
    began = time.monotonic()
    assert len(submit(engine, ROLLOUTS, tokens=60, background=True).future.result(60).token_ids) > 0
    took = time.monotonic() - began
    assert steps(engine, ROLLOUTS) > 2 + 2 * took / GIVE_WAY_S  # nobody was waited for
    engine.close()


def active(serial: int, *, background: bool, sampled: int = 0):  # type: ignore[no-untyped-def]
    sequence = ActiveSequence(
        Request(prompt=[1], background=background), serial, 4, matcher=None, on_token=None  # type: ignore[arg-type]
    )  # fmt: skip
    sequence.results = [None] * sampled  # type: ignore[list-item]
    return sequence


def test_the_foreground_queues_before_the_background_that_has_not_begun() -> None:
    waiting = Waiting(limit=3)
    begun = active(0, background=True, sampled=2)
    waiting.put_back([begun])
    for serial, background in enumerate([True, False, True, False], start=1):
        waiting.add(active(serial, background=background))
    assert [one.serial for one in waiting] == [0, 2, 4, 1, 3]
    waiting.take().aborted = True
    gone = next(iter(waiting))
    gone.aborted = True
    assert waiting.take_aborted() == [gone]
    assert [one.serial for one in waiting] == [4, 1, 3]


def test_a_queue_full_of_the_background_takes_the_foreground() -> None:
    waiting = Waiting(limit=2)
    for serial in range(2):
        waiting.add(active(serial, background=True))
    with pytest.raises(EngineBusy):
        waiting.check_room(Request(prompt=[1], background=True))
    waiting.check_room(Request(prompt=[1]))
    for serial in (2, 3):
        waiting.add(active(serial, background=False))
    with pytest.raises(EngineBusy):
        waiting.check_room(Request(prompt=[1]))
