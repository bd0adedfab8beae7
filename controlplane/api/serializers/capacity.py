"""What rollout capacity a run needs, what a replica more would buy, what a task costs."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from rl_core.capacity import THEORETICAL_SHARE, Limit

LIMITS = [(limit.value, limit.value) for limit in Limit]


class FurtherSerializer(serializers.Serializer[Any]):
    """What one more replica of a cluster buys."""

    tokens_s = serializers.FloatField()
    step_s = serializers.FloatField()
    steps_hour_more = serializers.FloatField()
    trainer_idle_share = serializers.FloatField()
    dollars_hour = serializers.FloatField(allow_null=True)
    replicas_to_balance = serializers.IntegerField(help_text="so many more of them keep the trainer busy")


class ClusterPaceSerializer(serializers.Serializer[Any]):
    """A cluster over the measured steps."""

    cluster = serializers.CharField(source="cluster.slug")
    device = serializers.CharField(source="measured.device")
    devices = serializers.IntegerField(source="measured.devices", help_text="of one replica")
    replicas = serializers.IntegerField(source="measured.replicas")
    rollouts = serializers.IntegerField()
    tokens_s = serializers.FloatField(source="measured.tokens_s", help_text="sampled, all replicas, idle time included")
    idle_share = serializers.SerializerMethodField(help_text="null: its engines do not tell")
    k3 = serializers.FloatField(allow_null=True, help_text="mismatch of what it sampled, mean over steps")
    dollars_million_tokens = serializers.FloatField(
        source="measured.dollars_million_tokens", allow_null=True, help_text="if never idle; null: no price"
    )
    task_dollars = serializers.SerializerMethodField(help_text="its part of what a task costs; null: no price")
    further = serializers.SerializerMethodField(help_text="one more replica; null without a plan")

    def get_idle_share(self, pace: Any) -> float | None:
        """What was told."""
        share: float = pace.measured.idle_share
        return share if pace.idle_known else None

    def get_task_dollars(self, pace: Any) -> float | None:
        """Of the plan."""
        paid: float | None = self.context["task_dollars"].get(pace.cluster.slug)
        return paid

    @extend_schema_field(FurtherSerializer(allow_null=True))
    def get_further(self, pace: Any) -> Any:
        """The planner's answer for this cluster."""
        more = self.context["further"].get(pace.cluster.slug)
        return FurtherSerializer(more).data if more else None


class DevicePaceSerializer(serializers.Serializer[Any]):
    """All clusters of one type of device."""

    device = serializers.CharField()
    devices = serializers.IntegerField()
    tokens_s = serializers.FloatField(help_text="of one device that is never idle")
    k3 = serializers.FloatField(allow_null=True)
    dollars_million_tokens = serializers.FloatField(allow_null=True)


class TaskCostSerializer(serializers.Serializer[Any]):
    """What one task costs, all attempts together; dollars pay for idle time, too."""

    sampled_tokens = serializers.FloatField()
    rollout_device_s = serializers.FloatField()
    trainer_device_s = serializers.FloatField()
    dollars = serializers.FloatField(allow_null=True, help_text="null: a price is missing")
    trainer_dollars = serializers.FloatField(allow_null=True, help_text="the trainer's part")


class PlanSerializer(serializers.Serializer[Any]):
    """What the measured rates come to."""

    limit = serializers.ChoiceField(choices=LIMITS, help_text="the side that the other one waits for")
    needed_tokens_s = serializers.FloatField(help_text="keep the trainer busy")
    capacity_tokens_s = serializers.FloatField(help_text="of all clusters, if never idle")
    missing_tokens_s = serializers.FloatField()
    step_s = serializers.FloatField(help_text="the shortest that these rates allow")
    trainer_idle_share = serializers.FloatField()
    rollouts_idle_share = serializers.FloatField()
    rollout_device_s_each = serializers.FloatField(help_text="for each device-second of the trainer")
    theoretical_device_s_each = serializers.FloatField(
        help_text=f"the same at equal utilisation: {THEORETICAL_SHARE:.2f}, divided by the share that is not in vain"
    )
    task = TaskCostSerializer()


class RunCapacitySerializer(serializers.Serializer[Any]):
    """A run's pace over its last steps, and the plan."""

    steps = serializers.IntegerField(help_text="that were measured")
    since = serializers.DateTimeField(allow_null=True)
    step_s = serializers.FloatField(allow_null=True, help_text="between two published steps")
    train_s = serializers.FloatField(source="demand.train_s", default=None, allow_null=True)
    step_tokens = serializers.FloatField(source="demand.step_tokens", default=None, allow_null=True)
    useful_share = serializers.FloatField(
        source="demand.useful_share", default=None, allow_null=True, help_text="of sampled tokens that reach a step"
    )
    trainer_idle_share = serializers.FloatField(allow_null=True, help_text="measured")
    clusters = serializers.SerializerMethodField()
    devices = DevicePaceSerializer(many=True)
    plan = PlanSerializer(allow_null=True)
    missing = serializers.CharField(help_text="what a plan still takes; empty with a plan")

    @extend_schema_field(ClusterPaceSerializer(many=True))
    def get_clusters(self, seen: Any) -> Any:
        """Each with what one more replica of it buys."""
        context = {**self.context, "further": seen.further, "task_dollars": seen.task_dollars}
        return ClusterPaceSerializer(seen.clusters, many=True, context=context).data
