"""Specs of a lane's cadence: when a slot opens, what a candidate must pass, and what is watched afterwards.

`cadence_parse` is the only way in: unknown keys, wrong types and values out of range are refused with the path of the
offending key. A saved spec is the resolved one: defaults that depend on other fields are filled in.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec.structs import force_setattr

from rl_core.errors import SpecError

SPEC_VERSION = 1
DAY_S = 86_400.0
SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MINUTES_A_DAY = 24 * 60
MINUTES_A_WEEK = 7 * MINUTES_A_DAY


class MetricSource(StrEnum):
    """Where a canary metric's values come from. All are averaged for each user first."""

    SIGNAL_REWARD = "signal_reward"  # the reward that the lane's signal map gives a generation
    SIGNAL = "signal"  # one signal's value; the key is its slug
    LATENCY = "latency"  # milliseconds until the whole answer
    FAILURE = "failure"  # 1 for a request that no replica answered
    REFUSAL = "refusal"  # 1 for an answer that refuses
    RESPONSE_RATE = "response_rate"  # 1 for a generation that got feedback
    BEHAVIOUR = "behaviour"  # one of the behaviours recorded with a generation; the key names it

    @property
    def span(self) -> float:
        """Width of the range that values of this source can take, 0 where it is not known."""
        return 1.0 if self in {self.FAILURE, self.REFUSAL, self.RESPONSE_RATE} else 0.0


class MetricRole(StrEnum):
    """What a metric is for."""

    GOAL = "goal"  # must be shown to be no worse (or better) before the last step passes
    GUARDRAIL = "guardrail"  # stops the canary when it is shown to be worse


class Direction(StrEnum):
    """Which way a metric is better."""

    HIGHER = "higher"
    LOWER = "lower"


class _Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all specs of this module."""

    def _require(self, ok: bool, message: str) -> None:
        if not ok:
            raise SpecError(message)


class WeeklyFreeze(_Spec, frozen=True, kw_only=True, tag_field="kind", tag="weekly"):
    """The same hours on some days of every week, local time. 0 is Monday.

    An `end` at or before `start` lies on the following day; `24:00` is the day's end.
    """

    days: tuple[int, ...]
    start: str = "00:00"
    end: str = "24:00"

    def __post_init__(self) -> None:
        self._require(bool(self.days), "days must name at least one day, 0 (Monday) to 6")
        self._require(all(0 <= day <= 6 for day in self.days), f"days must be 0 (Monday) to 6, not {self.days}")
        self._require(minutes_of(self.start) < MINUTES_A_DAY, f"start must be before 24:00, not {self.start}")
        self._require(minutes_of(self.start) != minutes_of(self.end), "start and end are the same: nothing is frozen")

    @property
    def length_minutes(self) -> int:
        """How long the freeze lasts on the clock."""
        return (minutes_of(self.end) - minutes_of(self.start) - 1) % MINUTES_A_DAY + 1


class DateFreeze(_Spec, frozen=True, kw_only=True, tag_field="kind", tag="date"):
    """One whole day, local time."""

    date: date


class OnceFreeze(_Spec, frozen=True, kw_only=True, tag_field="kind", tag="once"):
    """From one moment to another; both carry their offset from UTC."""

    start: datetime
    end: datetime

    def __post_init__(self) -> None:
        self._require(
            self.start.tzinfo is not None and self.end.tzinfo is not None,
            "start and end must carry an offset from UTC, such as 2026-12-24T18:00:00+01:00",
        )
        self._require(self.start < self.end, f"end must be after start, not {self.end.isoformat()}")


Freeze = WeeklyFreeze | DateFreeze | OnceFreeze


class GateSpec(_Spec, frozen=True, kw_only=True):
    """The evaluation that a candidate must not lose against the incumbent. Empty names are those of the run."""

    task_set: str = ""
    rubric: str = ""
    environment: str = ""
    tasks: int = 40
    temperature: float = 1.0
    margin: float = 0.02

    def __post_init__(self) -> None:
        self._require(self.tasks >= 1, f"tasks must be at least 1, not {self.tasks}")
        self._require(0 <= self.temperature <= 10, f"temperature must be in [0, 10], not {self.temperature}")
        self._require(0 <= self.margin < 1, f"margin must be in [0, 1), not {self.margin}")


class ShadowSpec(_Spec, frozen=True, kw_only=True):
    """Replay of recorded prompts on the candidate. `prompts` 0 leaves the shadow out.

    `rubric` names one whose criteria need no reference answer; it grades both answers to every prompt. Empty: none.
    """

    prompts: int = 0
    margin: float = 0.1
    max_tokens: int = 256
    rubric: str = ""

    def __post_init__(self) -> None:
        self._require(self.prompts >= 0, f"prompts must be 0 (off) or positive, not {self.prompts}")
        self._require(self.margin >= 0, f"margin must not be negative, not {self.margin}")
        self._require(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")


class MetricSpec(_Spec, frozen=True, kw_only=True):
    """One metric of a canary. `margin` is how much worse, in the metric's own unit, is still as good.

    `alpha_share` is the metric's part of the canary's alpha; 0 takes an equal part of what the others leave.
    """

    name: str
    source: MetricSource
    role: MetricRole
    direction: Direction
    margin: float
    key: str = ""
    alpha_share: float = 0.0

    def __post_init__(self) -> None:
        self._require(bool(SLUG.fullmatch(self.name)), f"name must be lower-case letters, digits, - and _: {self.name}")
        keyed = self.source in {MetricSource.SIGNAL, MetricSource.BEHAVIOUR}
        self._require(keyed == bool(self.key), f"{self.name}: key names the signal or the behaviour, and nothing else")
        self._require(self.margin >= 0, f"{self.name}: margin must not be negative, not {self.margin}")
        self._require(0 <= self.alpha_share <= 1, f"{self.name}: alpha_share must be in [0, 1]")


DEFAULT_METRICS = (
    MetricSpec(
        name="reward",
        source=MetricSource.SIGNAL_REWARD,
        role=MetricRole.GOAL,
        direction=Direction.HIGHER,
        margin=0.05,
        alpha_share=0.4,
    ),
    MetricSpec(
        name="failures",
        source=MetricSource.FAILURE,
        role=MetricRole.GUARDRAIL,
        direction=Direction.LOWER,
        margin=0.02,
    ),
    MetricSpec(
        name="refusals",
        source=MetricSource.REFUSAL,
        role=MetricRole.GUARDRAIL,
        direction=Direction.LOWER,
        margin=0.05,
    ),
    MetricSpec(
        name="responses",
        source=MetricSource.RESPONSE_RATE,
        role=MetricRole.GUARDRAIL,
        direction=Direction.HIGHER,
        margin=0.05,
    ),
)


class CanarySpec(_Spec, frozen=True, kw_only=True):
    """Shares of users that a candidate answers, one after the other, and what is measured. No steps: no canary.

    `alpha` bounds the chance that a candidate without harm is stopped by any metric, at any look, at any step of one
    release; `sample_ratio_alpha` the same for the sizes of the arms, beside it. A step is held for `hold_s` at least,
    and needs `minimum_users` with outcomes in each arm; the last one has to pass (`step_follow` in `canary`).
    With `require_gain` a goal must be shown to be better, not only no worse.
    """

    steps: tuple[float, ...] = (0.01, 0.05, 0.25, 0.50)
    hold_s: float = 3600.0
    minimum_users: int = 30
    alpha: float = 0.05
    sample_ratio_alpha: float = 0.001
    metrics: tuple[MetricSpec, ...] = DEFAULT_METRICS
    require_gain: bool = False

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in pairwise(self.steps))
        self._require(all(0 < share < 1 for share in self.steps), f"steps must be shares in (0, 1), not {self.steps}")
        self._require(ascending, f"steps must rise, or users would change arms back: {self.steps}")
        self._require(self.hold_s >= 0, f"hold_s must not be negative, not {self.hold_s}")
        self._require(self.minimum_users >= 2, f"minimum_users must be at least 2, not {self.minimum_users}")
        self._require(0 < self.alpha < 0.5, f"alpha must be in (0, 0.5), not {self.alpha}")
        self._require(0 < self.sample_ratio_alpha < 0.5, "sample_ratio_alpha must be in (0, 0.5)")
        names = [metric.name for metric in self.metrics]
        self._require(len(set(names)) == len(names), f"metrics must have different names: {', '.join(names)}")
        goals = any(metric.role is MetricRole.GOAL for metric in self.metrics)
        self._require(goals or not self.steps, "metrics must name at least one goal: a canary without one cannot pass")
        self._require_shares()

    def _require_shares(self) -> None:
        given = [metric.alpha_share for metric in self.metrics if metric.alpha_share > 0]
        rest = 1 - sum(given)
        self._require(rest >= -1e-9, f"alpha_share of all metrics must sum to at most 1, not {sum(given):g}")
        complete = len(given) == len(self.metrics)
        self._require(complete or rest > 1e-9, "alpha_share leaves nothing to the metrics that give none")

    def alpha_of(self, name: str) -> float:
        """The part of `alpha` that the metric may spend. Raises: KeyError."""
        metric = {metric.name: metric for metric in self.metrics}[name]
        if metric.alpha_share > 0:
            return self.alpha * metric.alpha_share
        rest = 1 - sum(other.alpha_share for other in self.metrics)
        return self.alpha * rest / sum(other.alpha_share == 0 for other in self.metrics)


class MonitorSpec(_Spec, frozen=True, kw_only=True):
    """What is watched against the incumbent for signs that the reward is being cheated.

    `threshold` is an absolute change of a behaviour's mean for each generation, `divergence` one between a proxy and
    the outcome, each from `minimum` generations on. With `hold` the cadence stands still until a person has looked.
    """

    behaviours: tuple[str, ...] = ("refusal", "question", "invalid_tool_calls", "edits")
    threshold: float = 0.1
    minimum: int = 50
    divergence: float = 0.15
    hold: bool = True

    def __post_init__(self) -> None:
        self._require(len(set(self.behaviours)) == len(self.behaviours), "behaviours must be named once each")
        self._require(self.threshold > 0, f"threshold must be positive, not {self.threshold}")
        self._require(self.minimum >= 1, f"minimum must be at least 1, not {self.minimum}")
        self._require(self.divergence > 0, f"divergence must be positive, not {self.divergence}")


class CadenceSpec(_Spec, frozen=True, kw_only=True):
    """A lane's cadence. Times are seconds; freezes are local to `timezone`.

    `interval_s` 0 opens slots by hand alone. A slot opens when it is due, nothing is frozen and `minimum_signals` have
    matured, that is, their generations are older than `horizon_s`. `deadline_s` after its opening an undecided slot is
    skipped; 0 is resolved to four intervals, or to a day without an interval. `stage` holds overrides of the run's
    real-time stage, validated where that stage is made.
    """

    current: ClassVar[int] = SPEC_VERSION

    interval_s: float = 0.0
    minimum_signals: int = 0
    horizon_s: float = 3600.0
    timezone: str = "UTC"
    freezes: tuple[Freeze, ...] = ()
    deadline_s: float = 0.0
    stage: dict[str, Any] = {}
    gate: GateSpec = GateSpec()
    shadow: ShadowSpec = ShadowSpec()
    canary: CanarySpec = CanarySpec()
    monitors: MonitorSpec = MonitorSpec()
    auto_promote: bool = False
    spec_version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        self._require(self.spec_version == SPEC_VERSION, f"spec_version {self.spec_version} is not known to this build")
        for name in ("interval_s", "minimum_signals", "horizon_s", "deadline_s"):
            self._require(getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}")
        self._require("lane" not in self.stage and "kind" not in self.stage, "stage must not name a lane or a kind")
        timezone_of(self.timezone)
        weekly = [freeze for freeze in self.freezes if isinstance(freeze, WeeklyFreeze)]
        self._require(_free_minutes(weekly) > 0, "the weekly freezes cover the whole week: no slot could ever open")
        if self.deadline_s == 0:
            force_setattr(self, "deadline_s", 4 * self.interval_s or DAY_S)


def cadence_parse(data: dict[str, Any] | bytes) -> CadenceSpec:
    """Validate a cadence given as a mapping or as JSON bytes. Raises: SpecError, naming the key."""
    try:
        if isinstance(data, bytes):
            return msgspec.json.decode(data, type=CadenceSpec)
        return msgspec.convert(data, type=CadenceSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"the cadence is not valid: {error}") from error
    except msgspec.DecodeError as error:
        raise SpecError(f"the cadence is not JSON: {error}") from error


def cadence_resolve(spec: CadenceSpec) -> dict[str, Any]:
    """The cadence as plain JSON data with every default filled in."""
    resolved: dict[str, Any] = msgspec.to_builtins(spec)
    return resolved


def cadence_schema() -> dict[str, Any]:
    """The JSON Schema of a cadence, for forms and the API document."""
    return msgspec.json.schema(CadenceSpec)


def timezone_of(name: str) -> ZoneInfo:
    """The time zone of that name. Raises: SpecError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        message = f"timezone {name!r} is not known here; use a name such as Europe/Paris, or install the tzdata package"
        raise SpecError(message) from error


def minutes_of(clock: str) -> int:
    """Minutes after midnight of `HH:MM`; `24:00` is 1440. Raises: SpecError."""
    if clock == "24:00":
        return MINUTES_A_DAY
    try:
        parsed = time.fromisoformat(clock)
    except ValueError as error:
        raise SpecError(f"not a time of day: {clock!r}; expected HH:MM") from error
    if len(clock) != len("HH:MM"):
        raise SpecError(f"not a time of day: {clock!r}; expected HH:MM")
    return parsed.hour * 60 + parsed.minute


def _free_minutes(freezes: list[WeeklyFreeze]) -> int:
    """How many minutes of a week without clock changes no freeze covers."""
    frozen = bytearray(MINUTES_A_WEEK)
    for freeze in freezes:
        for day in freeze.days:
            first = day * MINUTES_A_DAY + minutes_of(freeze.start)
            for minute in range(first, first + freeze.length_minutes):
                frozen[minute % MINUTES_A_WEEK] = 1
    return frozen.count(0)
