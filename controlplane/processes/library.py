"""Commands of the library that load torch, run apart from this process; and the models that they publish."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
from django.conf import settings

from controlplane.errors import Conflict
from controlplane.models import ModelCard, PolicyVersion, Project
from controlplane.processes.errors import ServiceFailed
from controlplane.selectors.publications import reading_of
from controlplane.services.blobs import marks_remove
from controlplane.services.catalog import model_register
from controlplane.services.events import Actor
from rl_core.types import WeightFormat

_TIMEOUT_S = 1800


class _Weights(msgspec.Struct, frozen=True):
    root: str
    manifest_key: str
    full_bytes: int
    parameters: int
    architecture: str
    fresh: bool


def model_publish(*, project: Project, slug: str, folder: Path, actor: Actor) -> ModelCard:
    """Put the folder's weights into the object store, whole, once, and register them under the slug.

    Raises: ServiceFailed with what is wrong with the folder; Conflict when the slug names other weights.
    """
    folder = checked_folder(folder)
    weights = _snapshot(folder)
    marks_remove(folder_key=weights.manifest_key.removesuffix("/manifest.json"))
    if not weights.fresh:
        weights = _snapshot(folder)  # what a collector took of it before the marks went is written again
    fields = {name: value for name, value in msgspec.structs.asdict(weights).items() if name != "fresh"}
    return model_register(project=project, slug=slug, folder=str(folder), actor=actor, **fields)


def _snapshot(folder: Path) -> _Weights:
    line = library("rl_core.delta", "snapshot", "--model", str(folder), "--store", settings.STORE_URL)
    return msgspec.json.decode(line, type=_Weights)


def version_write(*, version: PolicyVersion, folder: Path, weight_format: WeightFormat) -> None:
    """Write the version as a new Hugging Face folder, from the store alone and verified.

    Raises: Conflict for a version that is not committed or is retired; ServiceFailed with what is wrong.
    """
    reading = reading_of(version)
    if reading is None:
        raise Conflict(f"nothing in the store leads to version {version.ref}: it is not committed, or retired")
    target = {
        "version": str(version.ref),
        "root": reading.root,
        "manifest": reading.manifest,
        "snapshot": reading.snapshot or None,
        "deltas": reading.deltas,
    }
    words = ("--model", version.lineage.model.folder, "--store", settings.STORE_URL, "--folder", str(folder))
    library(
        "rl_core.delta", "export", *words, "--format", weight_format, "--target", msgspec.json.encode(target).decode()
    )


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
