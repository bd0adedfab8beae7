"""The cheating watch: signs in a run's newest rollouts against its earlier versions'. It calls a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Count

from controlplane.models import Alert, RolloutWatch, Run
from controlplane.selectors.environment_watch import Sign, signs_by_group
from controlplane.services.alerts import alert_raise
from controlplane.states import AlertKind, GroupPurpose, RunState
from rl_core.signals.rises import Rise, rise
from rl_core.specs import RlStage, parse_run_spec

ALPHA = 0.01  # over all signs, at one block of an environment's rollouts
RECENT = 200  # rollouts that make a block, at least
EARLIER = 4000  # rollouts before it that it is compared with
RISE = 0.02  # what a rise must come to before a person is called


@dataclass(frozen=True, slots=True)
class Windows:
    """The versions whose rollouts are compared; none where there are too few rollouts."""

    recent: list[UUID]
    earlier: list[UUID]


def runs_watched() -> list[Run]:
    """Runs that roll out."""
    return list(Run.objects.filter(state=RunState.RUNNING).select_related("project", "lineage__head").order_by("pk"))


def run_watch(run: Run) -> list[Alert]:
    """Look at a run once; the alerts that were raised, each sign of each environment once a run."""
    rows = RolloutWatch.objects.filter(version__lineage_id=run.lineage_id)
    raised = []
    for environment in rows.values_list("environment", flat=True).distinct().order_by("environment"):
        windows = windows_of(run, environment)
        if not windows.recent or not windows.earlier:
            continue
        for sign, found in compare(environment, windows).items():
            alert = _judge(run, environment, sign, found)
            if alert is not None:
                raised.append(alert)
    return raised


def windows_of(run: Run, environment: str) -> Windows:
    """The newest whole block of RECENT rollouts (whole versions), and the versions before it up to EARLIER rollouts.

    Blocks are counted from the run's first version, and of versions too old for the staleness bound alone: no rollout
    of theirs is still to come, so that every look at one block is the same look. Evaluations are other tasks, and of
    any version at any time: they are left out.
    """
    rows = RolloutWatch.objects.filter(
        version__lineage_id=run.lineage_id,
        version__number__lt=run.lineage.head.number - _staleness_bound(run) if run.lineage.head else 0,
        environment=environment,
        rollout__group__purpose=GroupPurpose.TRAIN,
    )
    counted = rows.values("version").annotate(n=Count("pk")).order_by("version__epoch", "version__number")
    blocks: list[list[UUID]] = []
    block: list[UUID] = []
    taken = 0
    for row in counted:
        block.append(row["version"])
        taken += row["n"]
        if taken >= RECENT:
            blocks.append(block)
            block, taken = [], 0
    if len(blocks) < 2:
        return Windows([], [])
    return Windows(blocks[-1], [version for one in blocks[-1 - EARLIER // RECENT : -1] for version in one])


def compare(environment: str, windows: Windows) -> dict[Sign, Rise]:
    """The rise of each sign that has something to count on both sides, by groups of attempts."""
    before, now = (signs_by_group(environment, side) for side in (windows.earlier, windows.recent))
    found = {sign: rise(before[sign], now[sign], least=RISE) for sign in Sign}
    return {sign: one for sign, one in found.items() if one is not None}


def _staleness_bound(run: Run) -> int:
    stages = parse_run_spec(run.spec).stages
    return max(stage.max_staleness if isinstance(stage, RlStage) else 0 for stage in stages)


def _judge(run: Run, environment: str, sign: Sign, found: Rise) -> Alert | None:
    if found.by < RISE or found.p > ALPHA / len(Sign):
        return None
    detail = {
        "about": f"{sign.value} in {environment}, run {run.name}",
        "reason": f"{sign.value}: {found.before:.3g} before, {found.now:.3g} now",
        "run": str(run.pk),
        "environment": environment,
        "sign": sign.value,
        "before": found.before,
        "now": found.now,
        "p": found.p,
    }
    return _raise_once(run, f"{run.pk}:{sign.value}:{environment}"[:100], detail)


@transaction.atomic
def _raise_once(run: Run, subject: str, detail: dict[str, Any]) -> Alert | None:
    """A person who resolved it has judged this run: it is not raised again."""
    if Alert.objects.filter(project=run.project, kind=AlertKind.CHEATING, subject=subject).exists():
        return None
    return alert_raise(lane=None, project=run.project, kind=AlertKind.CHEATING, subject=subject, detail=detail)
