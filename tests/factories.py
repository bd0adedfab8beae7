"""A project as people see it: members, catalogue, clusters, trajectories. `tests.playing` plays runs in it."""

from __future__ import annotations

import math
import random
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from controlplane.models import (
    Cluster,
    Project,
    RolloutGroup,
    User,
)
from controlplane.services.catalog import model_register, rubric_publish, task_set_create
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import (
    cluster_create,
    replica_register,
)
from controlplane.services.tenancy import project_create, user_create
from controlplane.states import MemberRole
from rl_core.environments.tasks import Task
from rl_core.environments.tasks import TaskSet as TaskList
from rl_core.types import (
    ClusterRole,
    Ending,
    Message,
    Role,
    SamplingParams,
    Split,
    TokenSegment,
    ToolCall,
    Trajectory,
    VersionSpan,
)

PASSWORD = "launch-the-ship-42"
FULL_BYTES = 269_060_000
ELEMENTS = 134_515_008
HOSTILE = '<script>alert("x")</script>\x1b[31mred\u202egnp.exe & <b onmouseover=alert(1)>'

CRITERIA: list[dict[str, Any]] = [
    {"key": "tool_ran", "text": "The calculator ran", "kind": "tool_ran", "weight": 0.2, "tier": "optional"},
    {"key": "tool_result_right", "text": "Its result is right", "kind": "tool_result_right", "weight": 0.3},
    {
        "key": "final_number_right",
        "text": "The answer states the right number",
        "kind": "final_number_right",
        "weight": 0.5,
        "tier": "essential",
    },
]


@dataclass
class Workspace:
    """A project with people. `run` is added by `play`."""

    project: Project
    owner: User
    people: dict[str, User] = field(default_factory=dict)
    clusters: list[Cluster] = field(default_factory=list)


def make_workspace(name: str = "Acme agents", slug: str = "") -> Workspace:
    """An empty project with one login for each role; every password is `PASSWORD`."""
    slug = slug or f"acme-{uuid.uuid4().hex[:6]}"
    project = project_create(slug=slug, name=name, actor=SYSTEM)
    people = {
        role.value: user_create(
            project=project, username=f"{role.value}-{slug}", password=PASSWORD, role=role, actor=SYSTEM
        )
        for role in MemberRole
    }
    return Workspace(project, people["owner"], people)


def furnish(workspace: Workspace, *, train: int = 40, heldout: int = 6, model_folder: Path | None = None) -> Workspace:
    """Add a model, a task set, a rubric and two rollout clusters, ready."""
    project = workspace.project
    folder = model_folder or Path("/nowhere")
    card = model_register(
        project=project,
        slug="smollm2-135m",
        folder=str(folder),
        root=digest("base"),
        manifest_key="snapshots/base/manifest.json",
        full_bytes=FULL_BYTES,
        parameters=ELEMENTS,
        architecture="LlamaForCausalLM",
        actor=SYSTEM,
    )
    tasks = [_task(Split.TRAIN, n) for n in range(train)] + [_task(Split.HELDOUT, n) for n in range(heldout)]
    task_set_create(
        project=project, slug="word-problems", environment="word-problems", tasks=TaskList(tuple(tasks)), actor=SYSTEM
    )
    rubric_publish(
        project=project, slug="word-problems", criteria=CRITERIA, author=workspace.owner, note="first", actor=SYSTEM
    )
    for slug, region in (("rollout-west", "us-west"), ("rollout-east", "eu-central")):
        cluster = cluster_create(
            project=project,
            slug=slug,
            role=ClusterRole.ROLLOUT,
            region=region,
            capacity=32,
            model=card,
            local=True,
            actor=SYSTEM,
        )
        replica_register(
            cluster=cluster,
            name="engine-1",
            inference_url="http://127.0.0.1:1",
            control_url="http://127.0.0.1:2",
            actor=SYSTEM,
        )
        workspace.clusters.append(cluster)
    return workspace


def _task(split: Split, number: int) -> Task:
    a, b = 41 + number % 59, 12 + number % 29
    text = f"There are {a} boxes with {b} pens in each. How many pens are there? ({split.value} {number})"
    return Task(
        id=f"{split.value}-boxes-{number:04d}",
        split=split,
        input={"question": text},
        reference={"answer": str(a * b), "expression": f"{a}*{b}"},
    )


def make_trajectory(
    group: RolloutGroup, *, seed: int = 0, ran: bool = True, right: bool = True, hostile: str = ""
) -> Trajectory:
    """Two turns with a calculator; sampled tokens of two versions. `hostile` is put wherever a model could write."""
    luck = random.Random(seed)
    solution = int(group.task.reference["answer"])
    expression = group.task.reference["expression"] if ran else "forty-one times twelve"
    answer = f"Answer: {solution if right else solution + 1}{hostile}"
    texts = [
        (Role.SYSTEM, "Solve word problems with a calculator. Reply <calc>EXPRESSION</calc> to use it."),
        (Role.USER, group.task.input["question"]),
        (Role.ASSISTANT, f"<calc>{expression}</calc>"),
        (Role.TOOL, str(solution) if ran else "not an expression"),
        (Role.ASSISTANT, answer),
    ]
    head = group.admitted_version
    older = head.parent if head.parent is not None and head.parent.lineage_id == head.lineage_id else head
    prompt, first, result, second = 30, 9, 6, 7
    total = prompt + first + result + second
    mask = [0] * prompt + [1] * first + [0] * result + [1] * second
    logprobs = [math.log(luck.uniform(0.02, 1.0) ** 2) if on else 0.0 for on in mask]
    segment = TokenSegment(
        token_ids=[luck.randrange(100, 20_000) for _ in range(total)],
        loss_mask=mask,
        logprobs=logprobs,
        spans=[
            VersionSpan(prompt, prompt + 4, str(older.ref)),
            VersionSpan(prompt + 4, prompt + first, str(head.ref)),
            VersionSpan(total - second, total, str(head.ref)),
        ],
        sampling=SamplingParams(max_tokens=20),
    )
    bounds = [
        (0, 12),
        (12, prompt),
        (prompt, prompt + first),
        (prompt + first, total - second),
        (total - second, total),
    ]
    return Trajectory(
        task_id=group.task.key,
        messages=[
            Message(role=role, content=text, parent=index - 1, segment=0, start=bounds[index][0], end=bounds[index][1])
            for index, (role, text) in enumerate(texts)
        ],
        segments=[segment],
        tool_calls=[ToolCall(tool="calc", arguments=expression + hostile, result=str(solution), ok=ran, turn=0)],
        ending=Ending.TERMINATED,
        artifacts={"note.txt": hostile} if hostile else {},
    )


def digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()
