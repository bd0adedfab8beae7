"""The demonstration's project: people, model, task sets, rubrics, clusters and a lane. Safe to run again."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec
from django.conf import settings

from controlplane.models import Cluster, Membership, ModelCard, Project, Replica, User
from controlplane.processes.errors import ServiceFailed
from controlplane.processes.library import checked_folder, library, model_publish
from controlplane.processes.output import Say
from controlplane.processes.records import write_atomically
from controlplane.processes.seed_lane import seed_lane
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.tenancy import membership_set, project_create, user_create
from controlplane.states import MemberRole
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.types import ClusterRole

PROJECT = "demo"
PEOPLE = {"engineer": MemberRole.OWNER, "reviewer": MemberRole.REVIEWER}
ROLLOUT_CLUSTERS = {"rollout-west": "us-west", "rollout-east": "eu-central"}
SERVING_CLUSTER = "serving"
SESSIONS_PER_CLUSTER = 32
DENSE, MOE = "smollm2-135m-instruct", "smollm2-moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    """What a demonstration starts from: where its rollouts run, whose engines it needs, names with passwords."""

    project: Project
    model: ModelCard
    clusters: tuple[str, ...]
    engines: tuple[str, ...]
    logins: dict[str, str]


def seed_demo(*, say: Say, model_folder: Path | None = None, moe: bool = False) -> Seeded:
    """Make sure that everything is there, and say where it stands.

    Raises: ServiceFailed when the model cannot be prepared; ControlPlaneError.
    """
    folder, slug = _model_folder(model_folder, moe=moe, say=say)
    project = Project.objects.filter(slug=PROJECT).first()
    if project is None:
        project = project_create(slug=PROJECT, name="Demonstration", actor=SYSTEM)
    logins = _people(project)
    say(f"publishing the weights of {slug} to the object store, whole, once")
    model = model_publish(project=project, slug=slug, folder=folder, actor=SYSTEM)
    for environment in ENVIRONMENTS.values():
        task_set_create(
            project=project,
            slug=environment.slug,
            environment=environment.slug,
            tasks=environment.build_task_set(),
            actor=SYSTEM,
        )
        criteria = msgspec.to_builtins(environment.rubric.criteria)
        rubric_publish(
            project=project, slug=environment.rubric.slug, criteria=list(criteria), author=None, note="", actor=SYSTEM
        )
    clusters = tuple(_cluster_name(name, model) for name in ROLLOUT_CLUSTERS)
    for name, region in zip(clusters, ROLLOUT_CLUSTERS.values(), strict=True):
        _cluster(project, name, ClusterRole.ROLLOUT, region, model, weight_slots=1)
    engines = clusters
    if not moe:
        engines = (*clusters, SERVING_CLUSTER)
        serving = _cluster(project, SERVING_CLUSTER, ClusterRole.SERVING, "us-west", model, weight_slots=2)
        seed_lane(project=project, serving=serving, model=model)
    return Seeded(project=project, model=model, clusters=clusters, engines=engines, logins=logins)


def _model_folder(chosen: Path | None, *, moe: bool, say: Say) -> tuple[Path, str]:
    if chosen is not None:
        return checked_folder(chosen), _slug(chosen.name)
    dense = settings.STATE_DIR / "models" / DENSE
    if not (dense / "model.safetensors").is_file():
        say("converting SmolLM2-135M-Instruct from its package, once (about a minute)")
        library("rl_core.models", "convert", "--out", str(dense))
    if not moe:
        return dense, DENSE
    folder = settings.STATE_DIR / "models" / MOE
    if not (folder / "model.safetensors").is_file():
        say("upcycling it into a mixture of four experts, once")
        library("rl_core.models", "upcycle", "--src", str(dense), "--out", str(folder))
    return folder, MOE


def _people(project: Project) -> dict[str, str]:
    """Users with the passwords of last time, kept in a file that only we can read.

    Raises: ServiceFailed when a user of that name is somebody else's: their password is not ours to set.
    """
    path = settings.STATE_DIR / "demo_logins.json"
    known = msgspec.json.decode(path.read_bytes(), type=dict[str, str]) if path.exists() else {}
    logins = {}
    for name, role in PEOPLE.items():
        logins[name] = known.get(name) or secrets.token_urlsafe(9)
        user = User.objects.filter(username=name).first()
        if user is None:
            user_create(project=project, username=name, password=logins[name], role=role, actor=SYSTEM)
            continue
        if not Membership.objects.filter(project=project, user=user).exists():
            raise ServiceFailed(
                f"this database has a user {name!r} who is no member of project {PROJECT}: the demonstration leaves "
                "them alone; let it use another database (DATABASE_URL) or state folder (SLIPWAY_STATE)"
            )
        membership_set(project=project, user=user, role=role, actor=SYSTEM)
        if not user.check_password(logins[name]):
            user.set_password(logins[name])
            user.save(update_fields=["password"])
    write_atomically(path, msgspec.json.encode(logins))
    return logins


def _cluster(
    project: Project, slug: str, role: ClusterRole, region: str, model: ModelCard, *, weight_slots: int
) -> Cluster:
    cluster = Cluster.objects.filter(project=project, slug=slug).first() or cluster_create(
        project=project,
        slug=slug,
        role=role,
        region=region,
        capacity=SESSIONS_PER_CLUSTER,
        actor=SYSTEM,
        local=True,
        model=model,
    )
    if not Replica.objects.filter(cluster=cluster, name=f"{slug}-1").exists():
        # Where it listens is written down when it is started.
        replica_register(
            cluster=cluster,
            name=f"{slug}-1",
            inference_url="",
            control_url="",
            weight_slots=weight_slots,
            actor=SYSTEM,
        )
    return cluster


def _cluster_name(base: str, model: ModelCard) -> str:
    """A cluster's engines load one model, so another model has clusters of its own."""
    return base if model.slug == DENSE else f"{base}-{model.slug}"[:64]


def _slug(name: str) -> str:
    cleaned = "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
    return cleaned[:64] or "model"
