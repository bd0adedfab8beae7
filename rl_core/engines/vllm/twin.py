"""A second copy of the model: updates go into it while the first generates, then the two change places.

On a CPU, packing a model's layers anew takes longer than reading them, and would be most of a pause. With a twin the
pause is the exchange alone, for the price of the model's memory once more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import get_model_loader

from rl_core.errors import EngineError


class TwinModel:
    """The model that does not generate. `model` is it; after a `flip`, it is the one that did before."""

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        """Load it from the folder that the runner's model came from."""
        self._runner = runner
        # Where layers are looked up by name in a forward pass; the twin's must not take the names of the first.
        self._layers: dict[str, Any] = config.compilation_config.static_forward_context
        own = copy.copy(config)
        own.compilation_config = copy.copy(config.compilation_config)
        own.compilation_config.static_forward_context = {}
        own.compilation_config.static_all_moe_layers = []
        with set_current_vllm_config(own), _rotary_embeddings_of_its_own():
            self.model: Any = get_model_loader(own.load_config).load_model(
                vllm_config=own, model_config=own.model_config
            )
        self._own_layers: dict[str, Any] = own.compilation_config.static_forward_context
        both = set(self.serving.modules()) & set(self.model.modules())
        if any(list(layer.parameters()) + list(layer.buffers()) for layer in both):
            raise EngineError("vLLM shares layers between two models of this kind; start with --no-twin")

    @property
    def serving(self) -> Any:
        """The model that generates."""
        return self._runner.model

    def flip(self) -> None:
        """Let the twin generate from the next step on, over the keys and values that are there.

        An error leaves the model that generates as it is.
        """
        serving, own = dict(self._layers), {name: self._own_layers[name] for name in self._layers}
        for name, layer in serving.items():
            if hasattr(layer, "kv_cache"):
                _take_over(layer, own[name])
        self._layers.update(own)
        self._own_layers.update(serving)
        self._runner.model, self.model = self.model, self._runner.model


def _take_over(layer: Any, other: Any) -> None:
    """Give an attention layer what another has of a run: its cache, and what backends have laid down beside it."""
    for name, value in vars(layer).items():
        if name == "kv_cache" or name not in vars(other):
            setattr(other, name, value)


@contextmanager
def _rotary_embeddings_of_its_own() -> Iterator[None]:
    """VLLM makes one for all layers that would have the same; a load takes its buffers away for a while."""
    kept = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(kept)
