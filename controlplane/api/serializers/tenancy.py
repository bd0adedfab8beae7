"""Projects, people, keys."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.serializers.base import Input, ReasonInput
from controlplane.models import ApiKey, Membership, Project, User
from controlplane.states import Consent, MemberRole, Scope


class ProjectSerializer(serializers.ModelSerializer[Project]):
    """A project."""

    class Meta:
        model = Project
        fields = ["id", "slug", "name", "consent", "lending_allowed", "created_at"]
        read_only_fields = fields


class ProjectInput(Input):
    """A new project."""

    slug = serializers.SlugField(max_length=64)
    name = serializers.CharField(max_length=200)
    consent = serializers.ChoiceField(choices=Consent.choices, default=Consent.TRAIN)


class UserSerializer(serializers.ModelSerializer[User]):
    """A person."""

    email = serializers.CharField(read_only=True, help_text="empty when none is known")

    class Meta:
        model = User
        fields = ["id", "username", "email", "is_active", "date_joined", "last_login"]
        read_only_fields = fields


class UserInput(Input):
    """A new login, and its role in the project."""

    username = serializers.CharField(max_length=150)
    email = serializers.EmailField(max_length=254, required=False, allow_blank=True, default="")
    password = serializers.CharField(max_length=128, write_only=True, trim_whitespace=False)
    role = serializers.ChoiceField(choices=MemberRole.choices)


class MembershipSerializer(serializers.ModelSerializer[Membership]):
    """Somebody's role in the project."""

    user = UserSerializer(read_only=True)

    class Meta:
        model = Membership
        fields = ["id", "user", "role", "created_at"]
        read_only_fields = fields


class MembershipInput(ReasonInput):
    """A role for somebody who has a login already."""

    username = serializers.CharField(max_length=150)
    role = serializers.ChoiceField(choices=MemberRole.choices)


class KeySerializer(serializers.ModelSerializer[ApiKey]):
    """A key without its secret, which nobody has any more."""

    created_by = serializers.CharField(source="created_by.username", read_only=True, default=None, allow_null=True)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=Scope.choices), read_only=True)
    feedback_source = serializers.CharField(source="source.slug", read_only=True, default=None, allow_null=True)

    class Meta:
        model = ApiKey
        fields = [
            "id",
            "name",
            "prefix",
            "scopes",
            "feedback_source",
            "created_by",
            "created_at",
            "expires_at",
            "revoked_at",
            "last_used_at",
        ]
        read_only_fields = fields


class KeyInput(Input):
    """A new key."""

    name = serializers.CharField(max_length=200)
    scopes = serializers.ListField(
        child=serializers.ChoiceField(choices=Scope.choices), min_length=1, max_length=len(Scope)
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True, default=None)


class KeyCreatedSerializer(KeySerializer):
    """The answer to a key's creation: the only one that holds the key. A replay of the call holds null."""

    key = serializers.CharField(read_only=True, allow_null=True)

    class Meta(KeySerializer.Meta):
        fields = [*KeySerializer.Meta.fields, "key"]
        read_only_fields = fields


class GrantSerializer(serializers.Serializer[Any]):
    """What the caller holds in one project."""

    project = ProjectSerializer()
    role = serializers.ChoiceField(choices=MemberRole.choices, allow_null=True)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=Scope.choices))
    actions = serializers.ListField(child=serializers.CharField(), help_text="what the caller may do there")


class MeSerializer(serializers.Serializer[Any]):
    """The caller: a user or a key."""

    kind = serializers.ChoiceField(choices=[("user", "user"), ("api_key", "api_key")])
    name = serializers.CharField()
    grants = GrantSerializer(many=True)
