"""Factories: tiny random model folders. Weights are bf16-representable, so rounding changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rl_core.models.architecture import read_architecture
from rl_core.models.checkpoint import read_checkpoint
from rl_core.models.parameters import ComputeDtype, Parameters
from rl_core.models.transformer import Transformer

TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}


def make_folder(
    root: Path, *, experts: int = 0, tied: bool = True, seed: int = 0, std: float = 0.05, **sizes: int
) -> Path:
    """A random Llama folder, or a Mixtral one when `experts` is not 0, made by transformers itself."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    common = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "initializer_range": std,
    } | sizes  # fmt: skip
    if experts:
        config = MixtralConfig(
            **common, num_local_experts=experts, num_experts_per_tok=2, sliding_window=None, rope_theta=10000.0
        )
        model = MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**common))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0, 0.1)
    folder = root / f"tiny-{experts}-{tied}-{seed}"
    model.to(torch.bfloat16).save_pretrained(str(folder))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def make_transformer(folder: Path, *, dtype: ComputeDtype = ComputeDtype.FP32, trainable: bool = True) -> Transformer:
    """The folder as our trainable model."""
    arch = read_architecture(folder)
    return Transformer(Parameters(arch, read_checkpoint(folder), dtype=dtype, trainable=trainable))
