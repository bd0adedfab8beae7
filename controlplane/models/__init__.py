"""Every table. Written by `controlplane.services` alone, read through `controlplane.selectors`."""

from controlplane.models.alerts import Alert, AlertDelivery, AlertHook
from controlplane.models.base import Entity, new_id
from controlplane.models.catalog import ModelCard, Rubric, RubricVersion, Task, TaskSet
from controlplane.models.exports import Export, ExportFile, ExportPart
from controlplane.models.feedback import (
    Feedback,
    FeedbackReceipt,
    FeedbackSource,
    RejectedPayload,
    SignalDefinition,
    SignalMap,
)
from controlplane.models.fleet import Cluster, Replica, ReplicaSlot, Transfer
from controlplane.models.generations import Generation
from controlplane.models.lanes import Approval, CadenceSlot, CanaryStep, Lane, Release, ServedVersion
from controlplane.models.lending import LendingPolicy, Loan
from controlplane.models.remote import RemoteEnvironment, RolloutCall, RolloutSession
from controlplane.models.runs import (
    BatchItem,
    CriterionScore,
    Evaluation,
    MetricPoint,
    Rollout,
    RolloutGroup,
    Run,
    Stage,
    Step,
)
from controlplane.models.storage import Garbage
from controlplane.models.tasks import RolloutWatch, TaskSetProof, TaskTally
from controlplane.models.tenancy import ApiKey, IdempotencyRecord, Membership, Project, User
from controlplane.models.weights import Lineage, PolicyVersion, Publication
from controlplane.models.work import Attempt, Event, Topic, WorkUnit

__all__ = [
    "Alert",
    "AlertDelivery",
    "AlertHook",
    "ApiKey",
    "Approval",
    "Attempt",
    "BatchItem",
    "CadenceSlot",
    "CanaryStep",
    "Cluster",
    "CriterionScore",
    "Entity",
    "Evaluation",
    "Event",
    "Export",
    "ExportFile",
    "ExportPart",
    "Feedback",
    "FeedbackReceipt",
    "FeedbackSource",
    "Garbage",
    "Generation",
    "IdempotencyRecord",
    "Lane",
    "LendingPolicy",
    "Lineage",
    "Loan",
    "Membership",
    "MetricPoint",
    "ModelCard",
    "PolicyVersion",
    "Project",
    "Publication",
    "RejectedPayload",
    "Release",
    "RemoteEnvironment",
    "Replica",
    "ReplicaSlot",
    "Rollout",
    "RolloutCall",
    "RolloutGroup",
    "RolloutSession",
    "RolloutWatch",
    "Rubric",
    "RubricVersion",
    "Run",
    "ServedVersion",
    "SignalDefinition",
    "SignalMap",
    "Stage",
    "Step",
    "Task",
    "TaskSet",
    "TaskSetProof",
    "TaskTally",
    "Topic",
    "Transfer",
    "User",
    "WorkUnit",
    "new_id",
]
