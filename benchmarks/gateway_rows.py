"""A lane for the gateway's benchmark: a tokenizer, a replica that holds the version, a key. Needs Django set up."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from controlplane.models import Generation, Replica, ReplicaSlot
from controlplane.services.catalog import model_register
from controlplane.services.events import Actor
from controlplane.services.fleet import cluster_create, replica_register
from controlplane.services.lanes import lane_create
from controlplane.services.tenancy import api_key_create, project_create
from controlplane.states import ActorKind, GenerationOutcome, ReplicaState, Scope
from rl_core.chat import ChatTokenizer
from rl_core.types import ClusterRole

ACTOR = Actor(ActorKind.SYSTEM, "benchmark")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "What does this function return when the list is empty, and should it raise instead? " * 6


@dataclass(frozen=True, slots=True)
class BenchLane:
    """What clients need to know of the lane."""

    slug: str
    version: str
    key: str
    text: str
    prompt: list[int]
    lane_id: uuid.UUID


def tokenizer_folder() -> Path:
    """A byte-level tokenizer with ChatML's template; no weights."""
    folder = Path(settings.STATE_DIR) / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


def token_of(folder: Path, text: str) -> int:
    """The token of one character."""
    return ChatTokenizer.load(folder).encode(text)[0]


def lane(*, folder: Path, engine_url: str, token: str) -> BenchLane:
    """Make the rows."""
    project = project_create(slug="benchmark", name="Benchmark", actor=ACTOR)
    model = model_register(
        project=project,
        slug="tiny",
        folder=str(folder),
        root="a" * 64,
        manifest_key="snapshots/a/manifest.json",
        full_bytes=1,
        parameters=1,
        architecture="LlamaForCausalLM",
        actor=ACTOR,
    )
    cluster = cluster_create(
        project=project, slug="serving", role=ClusterRole.SERVING, region="local", capacity=64, actor=ACTOR, model=model
    )
    made = lane_create(project=project, slug="assistant", cluster=cluster, model=model, actor=ACTOR)
    replica = replica_register(
        cluster=cluster, name="serving-0", inference_url=engine_url, control_url=engine_url, actor=ACTOR
    )
    Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY)
    ReplicaSlot.objects.filter(replica=replica).update(current_version=made.promoted_version)
    settings.REPLICA_TOKEN_DIR.mkdir(parents=True, exist_ok=True)
    (settings.REPLICA_TOKEN_DIR / f"{replica.pk}.inference").write_text(token)
    _, key = api_key_create(project=project, name="app", scopes=[Scope.GATEWAY], actor=ACTOR)
    prompt = ChatTokenizer.load(folder).render([{"role": "user", "content": TEXT}])
    return BenchLane(made.slug, str(made.promoted_version), key, TEXT, prompt, made.pk)


def recorded(lane: BenchLane) -> int:
    """How many answers of the lane are in the database, whole and with their content."""
    rows = Generation.objects.filter(lane_id=lane.lane_id, outcome=GenerationOutcome.ANSWERED)
    return rows.exclude(content_key="").count()
