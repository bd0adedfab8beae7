"""Reads for the pages: the strip from collected feedback to a promoted version, and how far the present turn is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.models import CadenceSlot, CanaryStep, Lane, Release
from controlplane.services.releases import ENDED, IN_FLIGHT, release_spec
from controlplane.states import CanaryVerdict, ReleaseState, SlotState
from rl_core.shipping.specs import CadenceSpec


class StageMark(StrEnum):
    """Where a stage of the strip stands."""

    DONE = "done"
    NOW = "now"
    PAUSED = "paused"
    STOPPED = "stopped"
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage: its name, where it stands, and what it waits for or showed."""

    label: str
    mark: StageMark = StageMark.AHEAD
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The present turn of a lane, or its last one: a slot, a release proposed by hand, or neither."""

    stages: list[PipelineStage]
    slot: CadenceSlot | None
    release: Release | None

    @property
    def under_way(self) -> bool:
        """Whether anything moves."""
        slot_moves = self.slot is not None and self.slot.state not in (SlotState.DONE, SlotState.SKIPPED)
        return slot_moves or (self.release is not None and self.release.state in IN_FLIGHT)


def pipeline_of(lane: Lane, spec: CadenceSpec, slots: list[CadenceSlot], releases: list[Release]) -> Pipeline:
    """The strip of what is under way; of what ended last when nothing is. Slots and releases are newest first."""
    flying = next((release for release in releases if release.state in IN_FLIGHT), None)
    slot = slots[0] if slots else None
    if flying is not None:
        mine = slot if slot is not None and slot.release_id == flying.pk else None
        return _of_release(flying, mine)
    newest = releases[0] if releases else None
    if slot is not None and (newest is None or slot.created_at >= newest.created_at):
        return _of_slot(slot, spec, releases)
    if newest is not None:
        mine = next((one for one in slots if one.release_id == newest.pk), None)
        return _of_release(newest, mine)
    return Pipeline([PipelineStage(label) for label in ("Collect", "Train", *_labels(spec))], None, None)


def _labels(spec: CadenceSpec) -> list[str]:
    shadow = ["Shadow"] if spec.shadow.prompts else []
    return ["Gate", *shadow, *(f"Canary {share:.0%}" for share in spec.canary.steps), "Promoted"]


def _of_slot(slot: CadenceSlot, spec: CadenceSpec, releases: list[Release]) -> Pipeline:
    """A slot that has no release yet, or ended without one."""
    if slot.release_id is not None:
        release = next((one for one in releases if one.pk == slot.release_id), None)
        if release is not None:
            return _of_release(release, slot)
    skipped = slot.state == SlotState.SKIPPED
    mark = StageMark.STOPPED if skipped else StageMark.NOW
    trains = slot.run_id is not None
    collect = PipelineStage("Collect", StageMark.DONE if trains else mark, "" if trains else slot.reason)
    train = PipelineStage("Train", mark, slot.reason) if trains else PipelineStage("Train")
    return Pipeline([collect, train, *(PipelineStage(label) for label in _labels(spec))], slot, None)


def _of_release(release: Release, slot: CadenceSlot | None) -> Pipeline:
    spec = release_spec(release)
    steps = sorted(release.steps.all(), key=lambda step: step.position)
    stages = _decided(release, spec, steps)
    labels = _labels(spec)
    at = _position(release, spec, steps, len(labels))
    marked = []
    for index, label in enumerate(labels):
        mark = StageMark.DONE if index < at else StageMark.AHEAD if index > at else _mark(release)
        waits = _waits(release, last=index == len(labels) - 1) if index == at else ""
        marked.append(PipelineStage(label, mark, stages.get(label, "") or waits))
    trained = release.run is not None or slot is not None
    first = StageMark.DONE if trained else StageMark.AHEAD
    detail = f"slot {slot.number}" if slot else "proposed by hand"
    return Pipeline([PipelineStage("Collect", first, detail), PipelineStage("Train", first), *marked], slot, release)


def _mark(release: Release) -> StageMark:
    if release.state == ReleaseState.PROMOTED:
        return StageMark.DONE
    if release.state == ReleaseState.PAUSED:
        return StageMark.PAUSED
    return StageMark.STOPPED if release.state in ENDED else StageMark.NOW


def _position(release: Release, spec: CadenceSpec, steps: list[CanaryStep], count: int) -> int:
    """Index of the stage that the release is at, or ended at, among gate, shadow, steps and promoted."""
    shadow = 1 if spec.shadow.prompts else 0
    state = release.paused_from if release.state == ReleaseState.PAUSED else release.state
    if release.promoted_at is not None:
        return count - 1
    if steps:
        last = 1 + shadow + steps[-1].position
        whole = steps[-1].position == len(spec.canary.steps) - 1 and steps[-1].verdict == CanaryVerdict.PASS
        return count - 1 if whole and state in IN_FLIGHT else last
    if shadow and (state == ReleaseState.SHADOW or release.shadow):
        return 1
    return 1 if release.gate.get("verdict") == "pass" else 0


def _decided(release: Release, spec: CadenceSpec, steps: list[CanaryStep]) -> dict[str, str]:
    """What each stage showed, by its label."""
    said = {f"Canary {step.share:.0%}": step.verdict for step in steps}
    if release.gate.get("verdict"):
        said["Gate"] = str(release.gate["verdict"])
    if release.shadow.get("verdict"):
        said["Shadow"] = str(release.shadow["verdict"])
    if release.state == ReleaseState.ROLLED_BACK and release.promoted_at is not None:
        said["Promoted"] = "rolled back"
    return said


def _waits(release: Release, *, last: bool) -> str:
    """What the stage waits for that has shown nothing yet."""
    if release.state in ENDED:
        return "" if release.state == ReleaseState.PROMOTED else str(release.state).replace("_", " ")
    if release.state == ReleaseState.PAUSED:
        return "paused"
    if last:
        return "waits for people"
    if release.state == ReleaseState.GATING and release.gate.get("verdict") == "pass":
        return "waits for its replicas"
    return {
        ReleaseState.PENDING.value: "waits for its gate",
        ReleaseState.GATING.value: "tried on the same tasks",
        ReleaseState.SHADOW.value: "prompts are replayed",
        ReleaseState.CANARY.value: "being watched",
    }.get(release.state, "")
