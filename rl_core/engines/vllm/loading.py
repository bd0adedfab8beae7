"""Checkpoint tensors into the layers of a running vLLM model, which holds them fused, packed and under other names.

vLLM reloads a layer by restoring it on the meta device, buffering what its loaders are given, and packing anew. A
layer of which only a part arrives is packed from that part, without an error: everything goes in by whole groups. A
group is a decoder layer, or what stands before or after them, so that q, k and v, gate and up, and all experts of a
layer are always together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import layerwise_groups
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_ON_NO_CPU: Final = torch.empty(0, device="meta")


def whole_groups(names: Iterable[str], changed: Iterable[str]) -> list[str]:
    """All names of the groups that `changed` touches, group by group, of a checkpoint's `names`."""
    touched = set(changed)
    groups = layerwise_groups(sorted(names))
    return [name for group in groups if not touched.isdisjoint(group) for name in group]


def load_groups(model: Any, config: ModelConfig, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Load `names`, which are whole groups, into vLLM's model. An error leaves the model in no defined state."""
    with torch.inference_mode():
        if any(name.endswith("lm_head.weight") for name in tensors):
            _untie_heads(model)
        initialize_layerwise_reload(model)
        try:
            model.load_weights((name, tensors[name]) for name in names)
        finally:
            # After an error too: what was buffered of half a layer would be taken for a part of the next load.
            finalize_layerwise_reload(model, config)
        _pack_again(model)


def _untie_heads(model: torch.nn.Module) -> None:
    """Give heads memory of their own that a checkpoint names apart: vLLM shares it where both happened to be equal."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for head in (layer for layer in layers if isinstance(layer, ParallelLMHead)):
        if id(head.weight) in embeddings:
            own = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
            own.__dict__.update(head.weight.__dict__)
            head.weight = own


def _pack_again(model: torch.nn.Module) -> None:
    """Pack what vLLM packs on a CPU and forgets in a reload, so that the old weights would go on computing.

    These are experts, which it packs on their first load alone, and a head that is tied to the embedding: nothing is
    loaded under the head's own name.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if next(layer.parameters(recurse=False), _ON_NO_CPU).device.type != "cpu":
            continue
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead) and method is not None:
            method.process_weights_after_loading(layer)
