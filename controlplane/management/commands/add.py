"""`manage.py add project|model|cluster|replica|environment`: what a company brings, from the machine with the state."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.validators import validate_slug
from django.db import transaction

from controlplane.errors import ControlPlaneError, Invalid, NotFound, Unavailable
from controlplane.models import Cluster, ModelCard, Project, User
from controlplane.processes.library import model_publish
from controlplane.processes.local_engines import replica_tokens
from controlplane.services.catalog import rubric_publish
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.remote_environments import remote_environment_register
from controlplane.services.tenancy import project_create, user_create
from controlplane.states import MemberRole, WeightSlot
from rl_core.environments.remote.client import RemoteClient, RemotePlace
from rl_core.environments.remote.environment import rubric_of
from rl_core.environments.remote.messages import Described
from rl_core.environments.remote.protocol import Kind
from rl_core.errors import EnvironmentFault, WorldError
from rl_core.types import ClusterRole


class Command(BaseCommand):
    """Exit codes: 0 added, 1 refused."""

    help = "Add a project with its owner, a model, a cluster, a replica, or a remote environment."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """One word says what is added."""
        kinds = parser.add_subparsers(dest="kind", required=True)
        project = kinds.add_parser("project", help="a project and the login of its owner")
        project.add_argument("slug")
        project.add_argument("--name", help="as people read it (default: the slug)")
        project.add_argument("--owner", required=True, help="a login: one that is there, or a new one")
        model = kinds.add_parser("model", help="publish a Hugging Face folder's weights and register them")
        model.add_argument("slug")
        model.add_argument("--folder", type=Path, required=True)
        cluster = kinds.add_parser("cluster", help="a place with engines")
        cluster.add_argument("slug")
        cluster.add_argument("--role", choices=[role.value for role in ClusterRole], required=True)
        cluster.add_argument("--model", required=True, help="the model that its engines load")
        cluster.add_argument("--region", required=True)
        cluster.add_argument("--capacity", type=int, required=True, help="sessions at once, all replicas together")
        cluster.add_argument("--local", action="store_true", help="`manage.py up` runs its engines")
        replica = kinds.add_parser("replica", help="an engine of a cluster")
        replica.add_argument("name")
        replica.add_argument("--cluster", required=True)
        replica.add_argument("--inference-url", default="", help="where it answers (not for a local cluster)")
        replica.add_argument("--control-url", default="", help="where it takes weights (not for a local cluster)")
        replica.add_argument("--weight-slots", type=int, choices=range(1, len(WeightSlot) + 1), default=1)
        environment = kinds.add_parser("environment", help="a world or an environment that answers at a URL")
        environment.add_argument("slug")
        environment.add_argument("--remote", metavar="URL", required=True, help="where it answers")
        environment.add_argument("--secret-file", type=Path, required=True, help="a file with the secret, whsec_...")
        environment.add_argument("--title", help="as people read it (default: the slug)")
        environment.add_argument("--session-seconds", type=int, default=1800, help="how long a session may take")
        environment.add_argument("--max-turns", type=int, default=30, help="of evaluations outside a run")
        for kind in (model, cluster, replica, environment):
            kind.add_argument("--project", required=True)

    def handle(self, *args: Any, kind: str, **options: Any) -> None:
        """Add it and say what to do next."""
        try:
            getattr(self, f"_{kind}")(**options)
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        except ControlPlaneError as error:
            raise CommandError(str(error)) from error

    def _project(self, *, slug: str, name: str | None, owner: str, **options: Any) -> None:
        validate_slug(slug)
        present = User.objects.filter(username=owner).first()
        password = secrets.token_urlsafe(12)
        with transaction.atomic():
            project = project_create(slug=slug, name=name or slug, actor=SYSTEM, owner=present)
            if present is None:
                user_create(project=project, username=owner, password=password, role=MemberRole.OWNER, actor=SYSTEM)
        self.stdout.write(f"project {slug} is there; its owner is {owner}")
        if present is None:
            self.stdout.write(f"log in  {owner} / {password}   (shown this once)")

    def _model(self, *, project: str, slug: str, folder: Path, **options: Any) -> None:
        validate_slug(slug)
        self.stdout.write(f"publishing the weights of {slug} to the object store, whole, once")
        card = model_publish(project=_project(project), slug=slug, folder=folder, actor=SYSTEM)
        self.stdout.write(f"model {slug}: {card.parameters:,} parameters, {card.full_bytes / 1e6:,.0f} MB, {card.root}")

    def _cluster(self, *, project: str, slug: str, role: str, model: str, region: str, **options: Any) -> None:
        validate_slug(slug)
        owner = _project(project)
        card = ModelCard.objects.filter(project=owner, slug=model).first()
        if card is None:
            raise NotFound(f"project {project} has no model {model!r}; add it: manage.py add model {model} ...")
        cluster_create(
            project=owner,
            slug=slug,
            role=ClusterRole(role),
            region=region,
            capacity=options["capacity"],
            local=options["local"],
            model=card,
            actor=SYSTEM,
        )
        self.stdout.write(f"cluster {slug} is there; next: manage.py add replica {slug}-1 --cluster {slug} ...")

    def _replica(self, *, project: str, name: str, cluster: str, weight_slots: int, **options: Any) -> None:
        validate_slug(name)
        place = Cluster.objects.filter(project=_project(project), slug=cluster).first()
        if place is None:
            raise NotFound(f"project {project} has no cluster {cluster!r}")
        urls = {kind: options[f"{kind}_url"] for kind in ("inference", "control")}
        if place.local and any(urls.values()):
            raise Invalid(f"cluster {cluster} is local: `manage.py up` chooses where its engines listen")
        for url in urls.values():
            if not place.local:
                _check_url(url)
        replica = replica_register(
            cluster=place,
            name=name,
            inference_url=urls["inference"],
            control_url=urls["control"],
            weight_slots=weight_slots,
            actor=SYSTEM,
        )
        if place.local:
            self.stdout.write(f"replica {name} is there; `manage.py up` starts its engine")
            return
        self.stdout.write(f"replica {name} is there. Its engine has to be started with the same tokens as these files:")
        for kind, path in replica_tokens(replica).items():
            self.stdout.write(f"  --{kind}-token-file   {path}")

    def _environment(self, *, project: str, slug: str, remote: str, secret_file: Path, **options: Any) -> None:
        validate_slug(slug)
        owner = _project(project)
        try:
            place = RemotePlace(remote, secret_file.read_text().strip())
        except (OSError, UnicodeError) as error:
            raise Invalid(f"{secret_file} does not read: {error}") from error
        described = _described(place)
        row = remote_environment_register(
            project=owner,
            slug=slug,
            title=options["title"] or slug,
            url=place.url,
            secret=place.secret,
            described=described,
            session_s=options["session_seconds"],
            max_turns=options["max_turns"],
            actor=SYSTEM,
        )
        self.stdout.write(f"environment {slug} is there: a remote {row.kind} at {place.url}")
        if described.kind is Kind.ENVIRONMENT and not owner.rubrics.filter(slug=slug).exists():
            criteria = msgspec.to_builtins(rubric_of(slug).criteria)
            rubric_publish(project=owner, slug=slug, criteria=criteria, author=None, note="", actor=SYSTEM)
            self.stdout.write(f"rubric {slug} is published: the reward as it is reported")
        self.stdout.write("next: upload a task set for it, and name it in a run")


def _described(place: RemotePlace) -> Described:
    """What the remote says of itself now. Raises: Invalid when it does not keep to the protocol; Unavailable."""
    try:
        return asyncio.run(RemoteClient(place, answer_s=20.0, patience_s=20.0).describe())
    except WorldError as error:
        raise Unavailable(str(error)) from error
    except (EnvironmentFault, ValueError) as error:
        raise Invalid(str(error)) from error


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise Invalid(f"not a URL of an engine: {url!r}; give both, as in http://host:8001")


def _project(slug: str) -> Project:
    project = Project.objects.filter(slug=slug).first()
    if project is None:
        raise NotFound(f"there is no project {slug!r}; add it: manage.py add project {slug} --owner NAME")
    return project
