"""How rollouts of an environment behaved, by policy version: signs of cheating, and simulation against production."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from django.db import connection
from django.db.models import Exists, OuterRef

from controlplane.models import Generation, Lane, PolicyVersion, Project, RolloutWatch
from controlplane.states import GenerationOutcome
from rl_core.environments.by_turn import COUNTED
from rl_core.signals.distributions import Difference, difference
from rl_core.signals.rises import Cell

VERSIONS = 12
COMPARED = 2000  # rollouts and answers that are compared at most


class Sign(StrEnum):
    """What is watched. More of each is worse."""

    GAP = "gap"  # visible tests passed where hidden ones did not
    IMPOSSIBLE_PASSED = "impossible_passed"
    TESTS_TOUCHED = "tests_touched"
    SPECIAL_CASED = "special_cased"
    EARLY_EXIT = "early_exit"
    TAMPERING = "tampering"
    TOOL_ERRORS = "tool_errors"  # of all calls
    NO_EDIT = "no_edit"


# What is summed for each sign, and over what: the share is the one over the other.
_SUMS = {
    Sign.GAP: ("w.gap", "w.gap IS NOT NULL"),
    Sign.IMPOSSIBLE_PASSED: ("w.impossible_passed::int", "w.impossible_passed IS NOT NULL"),
    Sign.TESTS_TOUCHED: ("w.tests_touched::int", "true"),
    Sign.SPECIAL_CASED: ("w.special_cased::int", "true"),
    Sign.EARLY_EXIT: ("w.early_exit::int", "true"),
    Sign.TAMPERING: ("w.tampering::int", "true"),
    Sign.TOOL_ERRORS: ("w.tool_errors", ""),
    Sign.NO_EDIT: ("w.no_edit::int", "w.no_edit IS NOT NULL"),
}
_COLUMNS = ", ".join(
    f"coalesce(sum({value}), 0)::float, "
    + (f"count(*) FILTER (WHERE {counted})" if counted else "coalesce(sum(w.tool_calls), 0)::bigint")
    for value, counted in _SUMS.values()
)
_FROM = """
FROM controlplane_rolloutwatch w
JOIN controlplane_policyversion v ON v.id = w.version_id
"""
_BY_VERSION = f"SELECT v.id, count(*), {_COLUMNS} {_FROM} WHERE w.environment = %s AND v.id = ANY(%s) GROUP BY v.id"
_BY_GROUP = f"""
SELECT {_COLUMNS} {_FROM}
JOIN controlplane_rollout r ON r.id = w.rollout_id
JOIN controlplane_rolloutgroup g ON g.id = r.group_id AND g.purpose = 'train'
WHERE w.environment = %s AND v.id = ANY(%s) GROUP BY g.id ORDER BY g.id
"""  # made of the table above alone


@dataclass(frozen=True, slots=True)
class Share:
    """A sum over what it was counted of; None where there was nothing to count."""

    total: float
    count: int

    @property
    def value(self) -> float | None:
        """The share."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class VersionSigns:
    """What the rollouts of one version showed."""

    version: PolicyVersion
    rollouts: int
    shares: dict[Sign, Share]


@dataclass(frozen=True, slots=True)
class Compared:
    """One behaviour of a version in simulation and in production, per turn."""

    key: str
    found: Difference


@dataclass(frozen=True, slots=True)
class EnvironmentWatch:
    """Signs by version, newest first; and the newest version that both rolled out and answered users."""

    versions: list[VersionSigns]
    compared_version: PolicyVersion | None
    compared: list[Compared]


def watch_of(project: Project, environment: str) -> EnvironmentWatch:
    """The whole watch of an environment in a project."""
    versions = signs_by_version(project, environment)
    answered = Generation.objects.filter(version=OuterRef("pk"), outcome=GenerationOutcome.ANSWERED)
    rolled_out = RolloutWatch.objects.filter(version=OuterRef("pk"), environment=environment)
    both = PolicyVersion.objects.filter(Exists(answered), Exists(rolled_out), lineage__project=project)
    version = both.order_by("-created_at").first()
    compared = simulation_against_production(environment, version) if version else []
    return EnvironmentWatch(versions, version, compared)


def signs_by_version(project: Project, environment: str, *, limit: int = VERSIONS) -> list[VersionSigns]:
    """The newest versions with rollouts of an environment, newest first."""
    rolled_out = RolloutWatch.objects.filter(version=OuterRef("pk"), environment=environment)
    newest = PolicyVersion.objects.filter(Exists(rolled_out), lineage__project=project).order_by("-created_at")
    versions = list(newest.select_related("lineage__run")[:limit])
    with connection.cursor() as cursor:
        cursor.execute(_BY_VERSION, [environment, [version.pk for version in versions]])
        rows = {row[0]: row[1:] for row in cursor.fetchall()}
    return [VersionSigns(version, rows[version.pk][0], _shares(rows[version.pk][1:])) for version in versions]


def signs_by_group(environment: str, versions: list[UUID]) -> dict[Sign, list[Cell]]:
    """What some versions' rollouts for training showed, a cell a group: attempts at one task are not independent."""
    with connection.cursor() as cursor:
        cursor.execute(_BY_GROUP, [environment, versions])
        groups = [_shares(row) for row in cursor.fetchall()]
    return {sign: [(one[sign].total, one[sign].count) for one in groups if one[sign].count] for sign in Sign}


def simulation_against_production(environment: str, version: PolicyVersion) -> list[Compared]:
    """Tool use, length and refusals of one version's turns in rollouts beside its answers to users; empty without both.

    An answer is compared with a turn, never with a rollout's average: averages spread less than what they are of.
    """
    watched = RolloutWatch.objects.filter(environment=environment, version=version).order_by("-rollout_id")
    turns = [turn for row in watched.values_list("turns", flat=True)[:COMPARED] for turn in row]
    lanes = list(Lane.objects.filter(project=version.lineage.project_id).values_list("pk", flat=True))
    answered = Generation.objects.filter(lane__in=lanes, version=version, outcome=GenerationOutcome.ANSWERED)
    answered = answered.order_by("-created_at")
    said = [row for row in answered.values_list("behaviour", flat=True)[:COMPARED] if isinstance(row, dict) and row]
    found = []
    for place, key in enumerate(COUNTED):
        compared = difference([float(turn[place]) for turn in turns], [float(row.get(key) or 0) for row in said])
        if compared is not None:
            found.append(Compared(key, compared))
    return found


def _shares(sums: list[float] | tuple[float, ...]) -> dict[Sign, Share]:
    return {sign: Share(float(sums[2 * n]), int(sums[2 * n + 1])) for n, sign in enumerate(_SUMS)}
