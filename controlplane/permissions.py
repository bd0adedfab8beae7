"""Who may do what: roles of members and scopes of API keys, in one matrix.

`tests/controlplane/api/test_permission_matrix.py` walks every endpoint with every role and every scope.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from controlplane.states import MemberRole, Scope


class Action(StrEnum):
    """Everything that needs a permission."""

    READ = "read"  # see everything of the project
    PROJECT_MANAGE = "project_manage"  # people and their roles, API keys
    CATALOG_WRITE = "catalog_write"  # task sets, models
    RUNS_CONTROL = "runs_control"  # create, pause, resume, stop, fork
    RUBRICS_PUBLISH = "rubrics_publish"  # rubric versions, signals and signal maps
    WEIGHTS_EXPORT = "weights_export"  # have versions written out, and download their weights
    FLEET_CONTROL = "fleet_control"  # clusters, replicas, pinned versions, lending
    REPLICA_ENROL = "replica_enrol"  # an engine registers itself and renews its lease
    WORK_REPLAY = "work_replay"  # dead letters
    LANES_MANAGE = "lanes_manage"  # create and configure lanes, sources of feedback
    RELEASES_PROPOSE = "releases_propose"  # propose, advance, pause, resume
    RELEASES_APPROVE = "releases_approve"  # approve and promote what another proposed
    RELEASES_ABORT = "releases_abort"  # abort, roll back: one person and a reason
    FEEDBACK_SEND = "feedback_send"  # feedback about generations
    FEEDBACK_RETRACT = "feedback_retract"
    USERS_ERASE = "users_erase"  # erase what a product's user left
    GATEWAY_CALL = "gateway_call"  # ask a lane's model


_EVERYONE = frozenset(MemberRole)
_BUILDERS = frozenset({MemberRole.OWNER, MemberRole.ENGINEER})
_OWNERS = frozenset({MemberRole.OWNER})
_AUTHORS = _BUILDERS | {MemberRole.REVIEWER}

ROLES: dict[Action, frozenset[MemberRole]] = {
    Action.READ: _EVERYONE,
    Action.PROJECT_MANAGE: _OWNERS,
    Action.CATALOG_WRITE: _BUILDERS,
    Action.RUNS_CONTROL: _BUILDERS,
    Action.RUBRICS_PUBLISH: _AUTHORS,
    Action.WEIGHTS_EXPORT: _BUILDERS,
    Action.FLEET_CONTROL: _BUILDERS,
    Action.REPLICA_ENROL: _BUILDERS,
    Action.WORK_REPLAY: _BUILDERS,
    Action.LANES_MANAGE: _BUILDERS,
    Action.RELEASES_PROPOSE: _BUILDERS,
    Action.RELEASES_APPROVE: _AUTHORS,
    Action.RELEASES_ABORT: _AUTHORS,
    Action.FEEDBACK_SEND: _AUTHORS,
    Action.FEEDBACK_RETRACT: _AUTHORS,
    Action.USERS_ERASE: _OWNERS,
    Action.GATEWAY_CALL: _AUTHORS,
}

_OPERATING = frozenset({Scope.READ, Scope.RUNS, Scope.RELEASES, Scope.RUBRICS, Scope.FLEET, Scope.EXPORT, Scope.ADMIN})

# A scope to operate implies reading; scopes of the product (feedback, gateway) let nothing be read.
SCOPES: dict[Action, frozenset[Scope]] = {
    Action.READ: _OPERATING,
    Action.PROJECT_MANAGE: frozenset({Scope.ADMIN}),
    Action.CATALOG_WRITE: frozenset({Scope.RUNS}),
    Action.RUNS_CONTROL: frozenset({Scope.RUNS}),
    Action.RUBRICS_PUBLISH: frozenset({Scope.RUBRICS}),
    Action.WEIGHTS_EXPORT: frozenset({Scope.EXPORT}),
    Action.FLEET_CONTROL: frozenset({Scope.FLEET}),
    Action.REPLICA_ENROL: frozenset({Scope.REPLICA}),
    Action.WORK_REPLAY: frozenset({Scope.RUNS, Scope.FLEET}),
    Action.LANES_MANAGE: frozenset({Scope.RELEASES}),
    Action.RELEASES_PROPOSE: frozenset({Scope.RELEASES}),
    Action.RELEASES_APPROVE: frozenset(),  # a person's word
    Action.RELEASES_ABORT: frozenset({Scope.RELEASES}),
    Action.FEEDBACK_SEND: frozenset({Scope.FEEDBACK}),
    Action.FEEDBACK_RETRACT: frozenset({Scope.FEEDBACK}),
    Action.USERS_ERASE: frozenset({Scope.ADMIN}),
    Action.GATEWAY_CALL: frozenset({Scope.GATEWAY}),
}


def allowed(grant: str | Iterable[str], action: Action) -> bool:
    """Whether a member's role (a string) or an API key's scopes (an iterable) permit the action.

    An unknown role or scope permits nothing.
    """
    if isinstance(grant, str):
        return grant in ROLES[action]
    return not SCOPES[action].isdisjoint(set(grant))
