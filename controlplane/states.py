"""States of everything that has a life cycle, and which changes are legal.

A change that is not in its table is refused (HTTP 409). `controlplane.services.transitions` is the one place that
applies them; `tests/controlplane/test_states.py` walks every pair.
"""

from __future__ import annotations

from enum import StrEnum

from django.db.models import TextChoices


class RunState(TextChoices):
    """Life of a run."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


class StageState(TextChoices):
    """Life of one stage of a run."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class StepState(TextChoices):
    """Life of one optimiser step: its batch is fixed, it is trained, its version is committed."""

    BATCHED = "batched"
    PUBLISHED = "published"
    FAILED = "failed"


class GroupState(TextChoices):
    """Life of a rollout group."""

    ADMITTED = "admitted"
    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    CONSUMED = "consumed"
    DROPPED = "dropped"  # past the staleness bound
    VOIDED = "voided"  # environment or infrastructure failed beyond repair


class RolloutState(TextChoices):
    """Life of one attempt at a task."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    SCORED = "scored"
    FAILED = "failed"


class VersionState(TextChoices):
    """Life of a policy version's publication."""

    PUBLISHING = "publishing"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class PublicationKind(TextChoices):
    """What a publication holds."""

    DELTA = "delta"  # from the version it was trained from
    SKIP = "skip"  # a delta over many versions
    SNAPSHOT = "snapshot"  # everything


class ExportState(TextChoices):
    """How far an export is; read from its row and its unit of work."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    DELETED = "deleted"


class TransferState(TextChoices):
    """Life of one replica's move to one version."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


UNDER_WAY = (TransferState.PENDING, TransferState.RUNNING)


class EvaluationState(TextChoices):
    """Life of an evaluation of one version on one split."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class ProofState(TextChoices):
    """Life of a task set's proof. A dead unit of work leaves it pending, and may be replayed."""

    PENDING = "pending"
    PROVEN = "proven"
    REFUSED = "refused"  # some tasks do not hold: no run may start with them


class ReplicaState(TextChoices):
    """What is known of an engine endpoint. Only those that are ready or reconciling are given requests."""

    OFFLINE = "offline"  # it does not answer, or its lease lapsed
    READY = "ready"
    RECONCILING = "reconciling"  # it answers with what it has while weights are on their way
    POISONED = "poisoned"  # what it holds is not what it should be: it waits for its repair
    DRAINING = "draining"  # taken out by a person; it finishes what it has
    DRAINED = "drained"  # and nothing is under way on it any more


class LoanState(TextChoices):
    """Life of the lending of one replica of a serving cluster to the rollouts of a run."""

    LENT = "lent"
    RETURNING = "returning"  # no rollout begins on it any more; its slot goes back
    RETURNED = "returned"


class ReleaseState(TextChoices):
    """Life of a release."""

    PENDING = "pending"
    GATING = "gating"
    SHADOW = "shadow"
    CANARY = "canary"
    PAUSED = "paused"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    SKIPPED = "skipped"
    FAILED = "failed"


class SlotState(TextChoices):
    """Life of one turn of a lane's cadence."""

    OPEN = "open"  # waits for its data
    TRAINING = "training"
    RELEASING = "releasing"
    DONE = "done"  # its release ended, promoted or not
    SKIPPED = "skipped"  # no data, a freeze, a hold, or undecided at its deadline: the row says which


class WorkState(TextChoices):
    """Life of a unit of work."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    CANCELLED = "cancelled"  # no longer wanted
    DEAD = "dead"  # out of attempts, or failed for good: a dead letter, which can be replayed


class AttemptState(TextChoices):
    """How one try at a unit of work went."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    YIELDED = "yielded"  # the slice ended; the unit goes on in a further attempt
    FAILED = "failed"  # an expected error
    ERRORED = "errored"  # a bug: the traceback is kept
    LAPSED = "lapsed"  # the lease ran out


class FeedbackState(TextChoices):
    """Life of one feedback event."""

    PENDING = "pending"  # its target is not known yet
    JOINED = "joined"
    LATE = "late"  # joined after its signal's horizon had closed: shown, never trained on
    ORPHANED = "orphaned"  # the horizon passed without its target
    RETRACTED = "retracted"
    QUARANTINED = "quarantined"  # given to a version that was rolled back


def _table(*pairs: tuple[TextChoices, tuple[TextChoices, ...]]) -> dict[TextChoices, frozenset[TextChoices]]:
    table = {state: frozenset(targets) for state, targets in pairs}
    for member in type(pairs[0][0]):
        table.setdefault(member, frozenset())
    return table


_R, _P, _G, _O = RunState, StepState, GroupState, RolloutState
_V, _T, _E, _C = VersionState, TransferState, EvaluationState, ReplicaState
_L, _W, _F = ReleaseState, WorkState, FeedbackState

TRANSITIONS: dict[type[TextChoices], dict[TextChoices, frozenset[TextChoices]]] = {
    RunState: _table(
        (_R.PENDING, (_R.RUNNING, _R.STOPPED, _R.FAILED)),
        (_R.RUNNING, (_R.PAUSED, _R.COMPLETED, _R.STOPPED, _R.FAILED)),
        (_R.PAUSED, (_R.RUNNING, _R.STOPPED, _R.FAILED)),
        (_R.FAILED, (_R.RUNNING,)),
    ),
    StageState: _table(
        (StageState.PENDING, (StageState.RUNNING,)),
        (StageState.RUNNING, (StageState.COMPLETED, StageState.FAILED)),
        (StageState.FAILED, (StageState.RUNNING,)),
    ),
    StepState: _table((_P.BATCHED, (_P.PUBLISHED, _P.FAILED)), (_P.FAILED, (_P.BATCHED,))),
    GroupState: _table(
        (_G.ADMITTED, (_G.RUNNING, _G.DROPPED, _G.VOIDED)),
        (_G.RUNNING, (_G.SCORING, _G.DROPPED, _G.VOIDED)),
        (_G.SCORING, (_G.READY, _G.DROPPED, _G.VOIDED)),
        (_G.READY, (_G.CONSUMED, _G.DROPPED)),
    ),
    RolloutState: _table(
        (_O.PENDING, (_O.RUNNING, _O.FAILED)),
        (_O.RUNNING, (_O.FINISHED, _O.FAILED, _O.PENDING)),
        (_O.FINISHED, (_O.SCORED, _O.FAILED)),
        (_O.FAILED, (_O.PENDING,)),
    ),
    VersionState: _table((_V.PUBLISHING, (_V.COMMITTED, _V.ABANDONED))),
    TransferState: _table(
        (_T.PENDING, (_T.RUNNING, _T.FAILED, _T.SUPERSEDED)),
        (_T.RUNNING, (_T.DONE, _T.FAILED, _T.SUPERSEDED, _T.PENDING)),
        (_T.FAILED, (_T.PENDING,)),
    ),
    EvaluationState: _table(
        (_E.PENDING, (_E.RUNNING, _E.FAILED)),
        (_E.RUNNING, (_E.DONE, _E.FAILED)),
        (_E.FAILED, (_E.PENDING,)),
    ),
    ProofState: _table((ProofState.PENDING, (ProofState.PROVEN, ProofState.REFUSED))),
    ReplicaState: _table(
        (_C.OFFLINE, (_C.READY, _C.RECONCILING, _C.POISONED, _C.DRAINING, _C.DRAINED)),
        (_C.READY, (_C.OFFLINE, _C.RECONCILING, _C.POISONED, _C.DRAINING, _C.DRAINED)),
        (_C.RECONCILING, (_C.OFFLINE, _C.READY, _C.POISONED, _C.DRAINING, _C.DRAINED)),
        (_C.POISONED, (_C.OFFLINE, _C.READY, _C.RECONCILING, _C.DRAINING, _C.DRAINED)),
        (_C.DRAINING, (_C.OFFLINE, _C.READY, _C.RECONCILING, _C.POISONED, _C.DRAINED)),
        (_C.DRAINED, (_C.OFFLINE, _C.READY, _C.RECONCILING, _C.POISONED, _C.DRAINING)),
    ),
    LoanState: _table(
        (LoanState.LENT, (LoanState.RETURNING, LoanState.RETURNED)),
        (LoanState.RETURNING, (LoanState.RETURNED,)),
    ),
    ReleaseState: _table(
        (_L.PENDING, (_L.GATING, _L.SKIPPED, _L.FAILED, _L.PAUSED)),
        (_L.GATING, (_L.SHADOW, _L.CANARY, _L.PROMOTED, _L.SKIPPED, _L.FAILED, _L.PAUSED)),
        (_L.SHADOW, (_L.CANARY, _L.PROMOTED, _L.SKIPPED, _L.FAILED, _L.PAUSED)),
        (_L.CANARY, (_L.PROMOTED, _L.ROLLED_BACK, _L.SKIPPED, _L.FAILED, _L.PAUSED)),
        (_L.PAUSED, (_L.PENDING, _L.GATING, _L.SHADOW, _L.CANARY, _L.SKIPPED, _L.ROLLED_BACK, _L.FAILED)),
        (_L.PROMOTED, (_L.ROLLED_BACK,)),
    ),
    WorkState: _table(
        (_W.QUEUED, (_W.LEASED, _W.CANCELLED, _W.DEAD)),
        (_W.LEASED, (_W.DONE, _W.QUEUED, _W.DEAD, _W.CANCELLED)),
        (_W.DEAD, (_W.QUEUED,)),
    ),
    SlotState: _table(
        (SlotState.OPEN, (SlotState.TRAINING, SlotState.SKIPPED)),
        (SlotState.TRAINING, (SlotState.RELEASING, SlotState.SKIPPED)),
        (SlotState.RELEASING, (SlotState.DONE, SlotState.SKIPPED)),
    ),
    FeedbackState: _table(
        (_F.PENDING, (_F.JOINED, _F.LATE, _F.QUARANTINED, _F.ORPHANED, _F.RETRACTED)),
        (_F.JOINED, (_F.RETRACTED, _F.QUARANTINED)),
        (_F.LATE, (_F.RETRACTED, _F.QUARANTINED)),
        (_F.ORPHANED, (_F.JOINED, _F.LATE, _F.QUARANTINED, _F.RETRACTED)),
        (_F.QUARANTINED, (_F.RETRACTED,)),
    ),
}


class WorkKind(TextChoices):
    """What a unit of work does. Each kind has one Celery task and one queue (`controlplane.dispatch`)."""

    ROLLOUT = "rollout"  # ref: RolloutGroup
    SCORE = "score"  # ref: RolloutGroup
    TRAIN = "train"  # ref: Step
    TRANSFER = "transfer"  # ref: Transfer
    EXPORT = "export"  # ref: Export
    DERIVE = "derive"  # ref: Publication
    SHADOW = "shadow"  # ref: Release
    NOTIFY = "notify"  # ref: AlertDelivery
    PROVE = "prove"  # ref: TaskSetProof


class Queue(StrEnum):
    """Celery queues, one worker kind each."""

    CONTROL = "control"
    ROLLOUT = "rollout"
    TRAIN = "train"
    TRANSFER = "transfer"
    SCORE = "score"


class GroupPurpose(TextChoices):
    """What a rollout group is for."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class DesiredSource(TextChoices):
    """Why a replica's slot should hold its desired version."""

    TRAINING_HEAD = "training_head"
    PROMOTED = "promoted"
    CANDIDATE = "candidate"
    EVALUATION = "evaluation"  # for as long as an evaluation needs it
    PINNED = "pinned"  # by a person, who alone ends it
    LENT = "lent"  # a run's training head, in the spare slot of a serving replica


FOLLOWING = (DesiredSource.TRAINING_HEAD, DesiredSource.LENT)


class WeightSlot(StrEnum):
    """Names of an engine's resident weight sets. Rollout replicas have the first alone."""

    DEFAULT = "default"
    CANDIDATE = "candidate"


class MemberRole(TextChoices):
    """What a member of a project may do; `controlplane.permissions` has the matrix."""

    OWNER = "owner"
    ENGINEER = "engineer"
    REVIEWER = "reviewer"
    VIEWER = "viewer"


class Scope(TextChoices):
    """What an API key may do."""

    READ = "read"
    RUNS = "runs"
    RELEASES = "releases"
    RUBRICS = "rubrics"
    FLEET = "fleet"
    ADMIN = "admin"
    FEEDBACK = "feedback"
    GATEWAY = "gateway"
    EXPORT = "export"  # have versions written out, and download their weights
    REPLICA = "replica"  # an engine's own: to register and renew its lease


class ActorKind(TextChoices):
    """Who caused an event."""

    USER = "user"
    API_KEY = "api_key"
    WORKER = "worker"
    CONDUCTOR = "conductor"
    SYSTEM = "system"


class PayloadKind(TextChoices):
    """What a kept payload was sent as."""

    FEEDBACK = "feedback"
    PRODUCT_EVENT = "product_event"


class SignalType(TextChoices):
    """Value type of a signal."""

    BOOLEAN = "boolean"
    NUMBER = "number"
    CATEGORY = "category"


class Consent(TextChoices):
    """What a user's data may be used for, from narrow to wide."""

    NONE = "none"
    EVAL = "eval"
    TRAIN = "train"


class Arm(TextChoices):
    """Which side of a lane answered."""

    PROMOTED = "promoted"
    CANARY = "canary"


class GenerationOutcome(TextChoices):
    """How a production request ended."""

    ANSWERED = "answered"
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"  # no replica could answer, or one broke off


class CanaryVerdict(TextChoices):
    """What a look at a canary says. No data is `undecided`, never `pass`."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    UNDECIDED = "undecided"


class AlertKind(TextChoices):
    """Why a person is called."""

    BEHAVIOUR = "behaviour"  # a rate moved against the incumbent
    DIVERGENCE = "divergence"  # a proxy and the outcome part
    GUARDRAIL = "guardrail"  # a canary was rolled back
    SAMPLE_RATIO = "sample_ratio"  # the arms' sizes do not fit their shares
    ORPHANS = "orphans"  # feedback finds no generations
    CHEATING = "cheating"  # a sign of cheating in rollouts of an environment rose
    SLOT_SKIPPED = "slot_skipped"
    LOAN_OVERDUE = "loan_overdue"  # a lent replica holds a training version longer than was promised to its users


class EventType(TextChoices):
    """Every kind of event. The second word says what happened, in the past tense."""

    PROJECT_CREATED = "project.created"
    MEMBER_CHANGED = "member.changed"
    KEY_CREATED = "key.created"
    KEY_REVOKED = "key.revoked"
    MODEL_REGISTERED = "model.registered"
    ENVIRONMENT_REGISTERED = "environment.registered"
    CLUSTER_CREATED = "cluster.created"
    CLUSTER_CHANGED = "cluster.changed"
    REPLICA_REGISTERED = "replica.registered"
    REPLICA_CHANGED = "replica.changed"
    REPLICA_TARGETED = "replica.targeted"
    REPLICA_STEERED = "replica.steered"
    LENDING_CHANGED = "lending.changed"
    LOAN_CHANGED = "loan.changed"
    TASK_SET_CREATED = "task_set.created"
    TASK_SET_PROVEN = "task_set.proven"
    RUBRIC_PUBLISHED = "rubric.published"
    RUN_CREATED = "run.created"
    RUN_CHANGED = "run.changed"
    STAGE_CHANGED = "stage.changed"
    GROUP_CHANGED = "group.changed"
    ROLLOUT_CHANGED = "rollout.changed"
    STEP_CHANGED = "step.changed"
    METRICS_RECORDED = "metrics.recorded"
    VERSION_CHANGED = "version.changed"
    EPOCH_OPENED = "epoch.opened"
    EXPORT_CHANGED = "export.changed"
    TRANSFER_CHANGED = "transfer.changed"
    EVALUATION_CHANGED = "evaluation.changed"
    WORK_DIED = "work.died"
    WORK_REPLAYED = "work.replayed"
    LANE_CREATED = "lane.created"
    LANE_CHANGED = "lane.changed"
    RELEASE_CHANGED = "release.changed"
    RELEASE_APPROVED = "release.approved"
    SLOT_CHANGED = "slot.changed"
    CANARY_ANALYSED = "canary.analysed"
    ALERT_RAISED = "alert.raised"
    ALERT_RESOLVED = "alert.resolved"
    ALERT_HOOK_CHANGED = "alert_hook.changed"
    CONSENT_WITHDRAWN = "consent.withdrawn"
    SIGNAL_MAP_PUBLISHED = "signal_map.published"
    SOURCE_CHANGED = "source.changed"
    FEEDBACK_RECEIVED = "feedback.received"
    FEEDBACK_CHANGED = "feedback.changed"
    PAYLOAD_REJECTED = "payload.rejected"
    USER_ERASED = "user.erased"
