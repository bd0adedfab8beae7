"""What the lane's demonstration prints: a block for each cycle, and the summary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from controlplane.processes.demo_report import clock, gain_line
from controlplane.processes.lane_demo.cycles import Cycle
from controlplane.processes.lane_demo.population import HELDOUT_PEOPLE, PEOPLE, Temper
from controlplane.processes.lane_demo.traffic import Tally
from controlplane.selectors.run_summary import Gain
from controlplane.services.gating import gate_sentence

WANTED_PROMOTIONS = 3


@dataclass(slots=True)
class LaneSummary:
    """What the demonstration came to."""

    cycles: list[Cycle] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    satisfaction: Gain | None = None
    facts: Gain | None = None

    @property
    def promotions(self) -> int:
        """Cycles that shipped their candidate to all users, without anybody's hand."""
        return sum(cycle.promoted for cycle in self.cycles if not cycle.sabotaged)

    @property
    def sabotaged(self) -> list[Cycle]:
        """The cycles that trained on inverted rewards."""
        return [cycle for cycle in self.cycles if cycle.sabotaged]

    @property
    def sabotage_stopped(self) -> bool:
        """Whether there was a sabotaged cycle and gate or canary stopped each."""
        return bool(self.sabotaged) and all(cycle.stopped_by for cycle in self.sabotaged)

    @property
    def gained(self) -> bool:
        """Whether people are shown to be more satisfied."""
        return self.satisfaction is not None and self.satisfaction.difference.above_zero

    @property
    def shown(self) -> bool:
        """Whether all was shown that was to be shown."""
        return self.promotions >= WANTED_PROMOTIONS and self.sabotage_stopped and self.gained


def cycle_lines(cycle: Cycle) -> Iterator[str]:
    """One cycle, as it went."""
    mark = "  SABOTAGED: thumbs up count as bad" if cycle.sabotaged else ""
    yield f"cycle {cycle.slot.number}{mark}"
    yield f"  people    {cycle.replies} replies, {cycle.satisfied:.0%} of the incumbent's truly satisfied"
    if cycle.step is not None and cycle.step.window:
        yield f"  window    {_window(cycle.step.window)}"
    release = cycle.release
    if release is not None and release.gate:
        yield f"  {gate_sentence(release.gate).replace('gate ', 'gate      ', 1)}"
    for step in release.steps.order_by("position") if release else ():
        yield f"  canary    {step.verdict or 'undecided'} at {step.share:.0%} of users{_effects(step.analysis)}"
    yield f"  end       {_ending(cycle)}  {clock(cycle.elapsed_s)}"


def _window(window: dict[str, object]) -> str:
    left_out = window.get("left_out")
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) if isinstance(left_out, dict) else ""
    return f"{window.get('items')} of {window.get('generations')} replies trained on; left out: {reasons or 'none'}"


def _effects(analysis: dict[str, object]) -> str:
    effects = analysis.get("effects")
    parts = []
    for name, seen in effects.items() if isinstance(effects, dict) else ():
        if seen.get("low") is not None:
            users = f"{seen['n_promoted']} and {seen['n_canary']} users"
            parts.append(f"{name} {seen['difference']:+.2f} [{seen['low']:+.2f}, {seen['high']:+.2f}], {users}")
    return ": " + "; ".join(parts) if parts else ""


def _ending(cycle: Cycle) -> str:
    if cycle.promoted:
        return "promoted"
    if cycle.stopped_by:
        return f"stopped by the {cycle.stopped_by}"
    return f"{cycle.slot.state}: {cycle.slot.reason}"


def summary_lines(summary: LaneSummary, *, tally: Tally, elapsed_s: float) -> Iterator[str]:
    """The summary, a line at a time."""
    yield f"{len(summary.cycles)} cycles in {clock(elapsed_s)}; {summary.promotions} promoted without a hand"
    yield gain_line("style", "held-out people truly satisfied (complete, short), first → last", summary.satisfaction)
    yield gain_line("truth", "key word of the right answer, first → last", summary.facts)
    yield "           what improved is style. Truth was neither rewarded nor trained"
    yield (
        f"people     all SIMULATED: {PEOPLE}, and {HELDOUT_PEOPLE} others held out; {tally.replies} replies, "
        f"{tally.silent} met with silence, {tally.slips} thumbs pressed by mistake"
    )
    yield from hostile_lines(tally)
    for alert in summary.alerts:
        yield f"alert      {alert}"
    stopped = [f"cycle {cycle.slot.number}: {_ending(cycle)}" for cycle in summary.sabotaged]
    yield f"sabotage   {'; '.join(stopped) or 'there was none'}"
    yield "verdict    " + ("shown: " if summary.shown else "NOT shown: ") + "; ".join(_verdicts(summary))


def hostile_lines(tally: Tally) -> Iterator[str]:
    """What became of those who mean it ill."""
    forged, flood = tally.sent(Temper.FORGER), tally.sent(Temper.FLOODER)
    yield f"forger     {forged} events sent, {forged - tally.accepted(Temper.FORGER)} refused"
    yield f"flooder    {flood} events sent, {flood - tally.accepted(Temper.FLOODER)} refused"
    yield f"contrary   {tally.sent(Temper.CONTRARY)} events sent, one voice of {PEOPLE}"


def _verdicts(summary: LaneSummary) -> Iterator[str]:
    yield f"{summary.promotions} of {WANTED_PROMOTIONS} cycles promoted"
    yield "satisfaction rose" if summary.gained else "no rise of satisfaction"
    yield "sabotage stopped" if summary.sabotage_stopped else "sabotage not stopped"
