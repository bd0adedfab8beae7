"""Commands of the library that load torch, run apart from this process; and the models that they publish."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
from django.conf import settings

from controlplane.models import ModelCard, Project
from controlplane.processes.errors import ServiceFailed
from controlplane.services.catalog import model_register
from controlplane.services.events import Actor

_TIMEOUT_S = 1800


class _Weights(msgspec.Struct, frozen=True):
    root: str
    manifest_key: str
    full_bytes: int
    parameters: int
    architecture: str


def model_publish(*, project: Project, slug: str, folder: Path, actor: Actor) -> ModelCard:
    """Put the folder's weights into the object store, whole, once, and register them under the slug.

    Raises: ServiceFailed with what is wrong with the folder; Conflict when the slug names other weights.
    """
    folder = checked_folder(folder)
    line = library("rl_core.delta", "snapshot", "--model", str(folder), "--store", settings.STORE_URL)
    weights = msgspec.structs.asdict(msgspec.json.decode(line, type=_Weights))
    return model_register(project=project, slug=slug, folder=str(folder), actor=actor, **weights)


def checked_folder(folder: Path) -> Path:
    """The folder as an absolute path. Raises: ServiceFailed when it is not of Hugging Face's form."""
    if not (folder / "config.json").is_file():
        raise ServiceFailed(f"{folder} is no model folder: it has no config.json; give a Hugging Face folder")
    return folder.resolve()


def library(module: str, *words: str) -> str:
    """Run `python -m module words`; the last line of its output. Raises: ServiceFailed with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
        cwd=settings.BASE_DIR,
    )
    if done.returncode != 0:
        raise ServiceFailed(f"python -m {module} {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().splitlines()[-1]
