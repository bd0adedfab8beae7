"""Releases, their canary steps, and what people do with them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import states
from controlplane.api.serializers.base import Input, OptionalChoice, ReasonInput, VersionBrief
from controlplane.models import Approval, CanaryStep, Release

MAX_REVISION = 2**31 - 1


class ApprovalSerializer(serializers.ModelSerializer[Approval]):
    """One person's word."""

    user = serializers.CharField(source="user.username", read_only=True)

    class Meta:
        model = Approval
        fields = ["user", "reason", "created_at"]
        read_only_fields = fields


class GateSerializer(serializers.Serializer[Any]):
    """The comparison with the incumbent on the same tasks."""

    verdict = serializers.ChoiceField(choices=["pass", "fail", "inconclusive"], required=False)
    n = serializers.IntegerField(required=False)
    difference = serializers.FloatField(required=False)
    low = serializers.FloatField(required=False)
    high = serializers.FloatField(required=False)
    margin = serializers.FloatField(required=False)
    candidate_mean = serializers.FloatField(required=False, allow_null=True)
    incumbent_mean = serializers.FloatField(required=False, allow_null=True)
    detail = serializers.CharField(required=False)


class EffectSerializer(serializers.Serializer[Any]):
    """Canary minus promoted for one metric, with an interval that holds at every look; null where it is not known."""

    difference = serializers.FloatField(allow_null=True)
    low = serializers.FloatField(allow_null=True)
    high = serializers.FloatField(allow_null=True)
    n_promoted = serializers.IntegerField()
    n_canary = serializers.IntegerField()
    mean_promoted = serializers.FloatField(allow_null=True)
    mean_canary = serializers.FloatField(allow_null=True)
    alpha = serializers.FloatField()
    fewest_latest = serializers.IntegerField()


class AnalysisSerializer(serializers.Serializer[Any]):
    """The newest look at a step."""

    verdict = serializers.ChoiceField(choices=states.CanaryVerdict.choices, required=False)
    reasons = serializers.ListField(child=serializers.CharField(), required=False)
    effects = serializers.DictField(child=EffectSerializer(), required=False)
    sample_ratio_p = serializers.FloatField(required=False, allow_null=True)
    exposures = serializers.ListField(
        child=serializers.ListField(child=serializers.FloatField()),
        required=False,
        help_text="step, share, users of the promoted arm, users of the canary",
    )
    matured = serializers.DictField(
        child=serializers.IntegerField(), required=False, help_text="users of each arm whose feedback is complete"
    )


class CanaryStepSerializer(serializers.ModelSerializer[CanaryStep]):
    """One share of users, and what was seen while the candidate answered them."""

    verdict = OptionalChoice(states.CanaryVerdict.choices)
    analysis = AnalysisSerializer(read_only=True)

    class Meta:
        model = CanaryStep
        fields = ["id", "position", "share", "verdict", "analysis", "analysed_at", "created_at", "ended_at"]
        read_only_fields = fields


class ShadowSerializer(serializers.Serializer[Any]):
    """The comparison of answers to replayed prompts."""

    verdict = serializers.ChoiceField(choices=["pass", "fail", "undecided", "waived"], required=False)
    detail = serializers.CharField(required=False)
    asked = serializers.IntegerField(required=False)
    n = serializers.IntegerField(required=False)
    margin = serializers.FloatField(required=False)
    effects = serializers.DictField(child=serializers.DictField(child=serializers.FloatField()), required=False)


class ReleaseSerializer(serializers.ModelSerializer[Release]):
    """A release. Send `revision` back as `expected_revision` to act on what you saw."""

    lane = serializers.CharField(source="lane.slug", read_only=True)
    version = VersionBrief(read_only=True)
    incumbent = VersionBrief(read_only=True, allow_null=True)
    proposer = serializers.CharField(source="proposer.username", read_only=True, default=None, allow_null=True)
    approvals = ApprovalSerializer(many=True, read_only=True)
    gate = GateSerializer(read_only=True)
    shadow = ShadowSerializer(read_only=True)
    paused_from = OptionalChoice(states.ReleaseState.choices)

    class Meta:
        model = Release
        fields = [
            "id",
            "lane",
            "version",
            "incumbent",
            "run",
            "state",
            "paused_from",
            "proposer",
            "reason",
            "outcome",
            "revision",
            "gate",
            "shadow",
            "share",
            "approvals",
            "created_at",
            "promoted_at",
            "finished_at",
        ]
        read_only_fields = fields


class ProposeInput(Input):
    """A version to be released: the head of the run that made it."""

    lane = serializers.SlugField(max_length=64)
    run = serializers.UUIDField()
    reason = serializers.CharField(max_length=500)
    supersede = serializers.BooleanField(
        required=False, default=False, help_text="skip a release in flight that no user has met yet"
    )


class ReleaseActionInput(ReasonInput):
    """Why, and which revision was seen."""

    reason = serializers.CharField(max_length=500)
    expected_revision = serializers.IntegerField(min_value=1, max_value=MAX_REVISION, required=False, default=None)
