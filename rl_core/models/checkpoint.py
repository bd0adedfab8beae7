"""Hugging Face checkpoint folders as dictionaries of named tensors, and what makes a folder a model.

Names are the checkpoint's own (`model.layers.0.self_attn.q_proj.weight`); a tied `lm_head.weight` is absent.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_core.errors import ModelError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUPPORTED = ("llama", "mixtral")
SHARD_BYTES = 5 << 30  # as Hugging Face splits checkpoints


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises: ModelError."""
    path = Path(folder) / CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is not a model folder: {CONFIG_NAME} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return config


def validate_model_folder(folder: Path) -> None:
    """Check that `folder` holds a supported model with whole weight files and a tokenizer. Raises: ModelError."""
    kind = read_config(folder).get("model_type")
    if kind not in SUPPORTED:
        raise ModelError(f"{folder} holds a {kind!r} model; supported are {', '.join(SUPPORTED)}")
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer into it")
    for path in _weight_files(Path(folder)):
        _tensor_names(path)


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, by checkpoint name, in name order. Raises: ModelError."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(Path(folder)):
        try:
            with safe_open(str(path), framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (no mapping)
                    tensors[name] = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file: {error}") from error
    if read_config(folder).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return dict(sorted(tensors.items()))


def write_checkpoint(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    like: Path,
    config: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `tensors` into a new `folder`, with config (or `config`), tokenizer and templates of the folder `like`.

    Weights of more than `shard_bytes` are spread over several files with an index. The folder appears whole and on
    disk, or not at all: it is written beside its place and renamed. Raises: ModelError when `folder` exists or `like`
    is no model folder.
    """
    folder = Path(folder)
    chosen = read_config(like) if config is None else config
    if folder.exists():
        raise ModelError(f"{folder} exists; model folders are written once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as scratch:
        part = Path(scratch) / "model"
        part.mkdir()
        for path in _side_files(Path(like)):
            shutil.copyfile(path, part / path.name)
        (part / CONFIG_NAME).write_text(json.dumps(chosen, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _write_shards(part, tensors, shard_bytes=shard_bytes)
        for path in [*part.iterdir(), part]:
            _sync(path)
        try:
            part.rename(folder)
        except OSError as error:
            if not folder.exists():
                raise
            raise ModelError(f"{folder} exists; model folders are written once") from error
    _sync(folder.parent)


def _write_shards(folder: Path, tensors: dict[str, Tensor], *, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and count_bytes(shards[-1] | {name: tensor}) > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor.detach().contiguous()
    if len(shards) == 1:
        save_file(shards[0], str(folder / WEIGHTS_NAME), metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    text = json.dumps({"metadata": {"total_size": count_bytes(tensors)}, "weight_map": index}, indent=2, sort_keys=True)
    (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Have the disk write a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def count_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def check_names(tensors: dict[str, Tensor], expected: Iterable[tuple[str, torch.Size]]) -> None:
    """Check that `tensors` has exactly the expected names and shapes. Raises: ModelError naming the first odd ones."""
    wanted = dict(expected)
    missing = sorted(set(wanted) - set(tensors))
    extra = sorted(set(tensors) - set(wanted))
    if missing or extra:
        raise ModelError(f"the weights do not fit the config: missing {missing[:3]}, unexpected {extra[:3]}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ModelError(f"{name} has shape {tuple(tensors[name].shape)}; the config wants {tuple(shape)}")


def _side_files(folder: Path) -> list[Path]:
    kept = {".json", ".jinja", ".txt", ".model"}
    skipped = {CONFIG_NAME, INDEX_NAME}
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in kept and p.name not in skipped)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error}") from error
        paths = [folder / Path(name).name for name in names]
    else:
        paths = [folder / WEIGHTS_NAME]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{folder} is not a model folder: {path.name} is missing")
    return paths


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(str(path), framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from error
