"""The catalogue: models, task sets and rubrics. What is published is immutable; a change is a new version."""

from __future__ import annotations

from typing import Any

import msgspec
from django.db import IntegrityError, transaction
from django.db.models import Max

from controlplane.errors import Conflict, Invalid
from controlplane.models import ModelCard, Project, Rubric, RubricVersion, Task, TaskSet, TaskSetProof, User
from controlplane.services.events import Actor, event_append, project_topic
from controlplane.services.work import work_enqueue
from controlplane.states import EventType, WorkKind
from rl_core.environments.reward import parse_rubric
from rl_core.environments.tasks import TaskSet as TaskList
from rl_core.environments.tasks import has_nul
from rl_core.errors import SpecError
from rl_core.types import Split


def model_register(
    *,
    project: Project,
    slug: str,
    folder: str,
    root: str,
    manifest_key: str,
    full_bytes: int,
    parameters: int,
    architecture: str,
    actor: Actor,
) -> ModelCard:
    """Add a model whose snapshot stands in the store. Registering the same weights again returns the same card.

    Raises: Conflict when the slug names other weights.
    """
    with transaction.atomic():
        card, created = ModelCard.objects.get_or_create(
            project=project,
            slug=slug,
            defaults={
                "folder": folder,
                "root": root,
                "manifest_key": manifest_key,
                "full_bytes": full_bytes,
                "parameters": parameters,
                "architecture": architecture,
            },
        )
        if not created and card.root != root:
            raise Conflict(f"model {slug!r} already names other weights; register these under another name", "slug")
        if created:
            _event(project, EventType.MODEL_REGISTERED, actor, {"model": str(card.pk), "slug": slug, "root": root})
        elif card.folder != folder:
            ModelCard.objects.filter(pk=card.pk).update(folder=folder)
            card.folder = folder
    return card


def task_set_create(
    *, project: Project, slug: str, environment: str, tasks: TaskList, actor: Actor, prove: bool = False
) -> TaskSet:
    """Store a task set as the slug's next version; the newest version is returned if its content is the same.

    With `prove` its tasks are held to their own tests before a run may start with them. Raises: Invalid when a split is
    empty, or for texts that the database cannot hold.
    """
    splits = {split: tasks.split(split) for split in Split}
    for split, members in splits.items():
        if not members:
            raise Invalid(f"the task set has no task in its {split.value} split; it needs both", "tasks")
    unstorable = [task.id for task in tasks.tasks if has_nul([task.input, task.reference])]
    if unstorable:
        raise Invalid(f"tasks with a NUL character, which cannot be stored: {', '.join(unstorable[:20])}", "tasks")
    digest = tasks.content_hash
    with transaction.atomic():
        Project.objects.select_for_update().get(pk=project.pk)
        newest = TaskSet.objects.filter(project=project, slug=slug).order_by("-version").first()
        if newest is not None and (newest.content_hash, newest.environment) == (digest, environment):
            return newest
        task_set = TaskSet.objects.create(
            project=project,
            slug=slug,
            version=newest.version + 1 if newest else 1,
            environment=environment,
            content_hash=digest,
            train_count=len(splits[Split.TRAIN]),
            heldout_count=len(splits[Split.HELDOUT]),
        )
        Task.objects.bulk_create(
            [
                Task(
                    task_set=task_set,
                    key=task.id,
                    split=split.value,
                    position=position,
                    input=task.input,
                    reference=task.reference,
                )
                for split, members in splits.items()
                for position, task in enumerate(members)
            ],
            batch_size=1000,
        )
        if prove:
            proof = TaskSetProof.objects.create(task_set=task_set)
            work_enqueue(kind=WorkKind.PROVE, ref=proof.pk, project_id=project.pk)
        _event(
            project,
            EventType.TASK_SET_CREATED,
            actor,
            {"task_set": str(task_set.pk), "slug": slug, "version": task_set.version},
        )
    return task_set


def rubric_publish(
    *,
    project: Project,
    slug: str,
    criteria: list[dict[str, Any]],
    author: User | None,
    note: str,
    actor: Actor,
) -> RubricVersion:
    """Publish criteria as the rubric's next immutable version; a version with the same content is returned instead.

    Raises: Invalid, naming the criterion, when they are not a rubric.
    """
    try:
        parsed = parse_rubric({"slug": slug, "criteria": criteria})
    except SpecError as error:
        raise Invalid(str(error), "criteria") from error
    resolved = msgspec.to_builtins(parsed.criteria)
    with transaction.atomic():
        rubric, _ = Rubric.objects.get_or_create(project=project, slug=slug)
        Rubric.objects.select_for_update().get(pk=rubric.pk)
        known = rubric.versions.filter(content_hash=parsed.content_hash).first()
        if known is not None:
            return known
        number = (rubric.versions.aggregate(last=Max("number"))["last"] or 0) + 1
        try:
            version = RubricVersion.objects.create(
                rubric=rubric,
                number=number,
                content_hash=parsed.content_hash,
                criteria=resolved,
                author=author,
                note=note[:500],
            )
        except IntegrityError as error:
            raise Conflict(f"rubric {slug!r} was published by somebody else just now; try again") from error
        _event(
            project,
            EventType.RUBRIC_PUBLISHED,
            actor,
            {"rubric": str(rubric.pk), "slug": slug, "number": number, "hash": parsed.content_hash},
            reason=note,
        )
    return version


def _event(project: Project, event_type: EventType, actor: Actor, data: dict[str, Any], reason: str = "") -> None:
    event_append(
        project_id=project.pk,
        topic=project_topic(project.pk),
        event_type=event_type,
        actor=actor,
        reason=reason,
        data=data,
    )
