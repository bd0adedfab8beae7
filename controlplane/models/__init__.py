"""Every table. Written by `controlplane.services` alone, read through `controlplane.selectors`."""

from controlplane.models.alerts import Alert, AlertDelivery, AlertHook
from controlplane.models.base import Entity, new_id
from controlplane.models.catalog import ModelCard, Rubric, RubricVersion, Task, TaskSet
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
from controlplane.models.tenancy import ApiKey, IdempotencyRecord, Membership, Project, User
from controlplane.models.weights import Lineage, PolicyVersion
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
    "Feedback",
    "FeedbackReceipt",
    "FeedbackSource",
    "Generation",
    "IdempotencyRecord",
    "Lane",
    "Lineage",
    "Membership",
    "MetricPoint",
    "ModelCard",
    "PolicyVersion",
    "Project",
    "RejectedPayload",
    "Release",
    "Replica",
    "ReplicaSlot",
    "Rollout",
    "RolloutGroup",
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
    "Topic",
    "Transfer",
    "User",
    "WorkUnit",
    "new_id",
]
