"""A version as a Hugging Face folder: from a model's folder and the store, verified, in any serving format."""

from __future__ import annotations

from pathlib import Path

from rl_core.delta.path import Target
from rl_core.delta.receiver import reconcile
from rl_core.delta.shadow import ShadowWeights
from rl_core.formats import serving_config, serving_weights
from rl_core.models.checkpoint import read_config, write_checkpoint
from rl_core.store import ObjectStore
from rl_core.types import WeightFormat


def export_folder(
    store: ObjectStore,
    target: Target,
    folder: Path,
    *,
    model: Path,
    weight_format: WeightFormat = WeightFormat.BF16,
    threads: int = 1,
) -> None:
    """Write the target's weights into a new `folder`, with config, tokenizer and templates of the folder `model`.

    The folder appears whole or not at all. Raises: ModelError when it exists, or the weights are in no format;
    BaseMismatch, DigestMismatch, ManifestError, ObjectMissing, StoreUnavailable.
    """
    shadow = ShadowWeights.from_checkpoint(model, threads=threads)
    if shadow.root != target.root:
        reconcile(store, shadow, target, threads=threads)
    weights = serving_weights(shadow.tensors, weight_format)
    write_checkpoint(folder, weights, like=model, config=serving_config(read_config(model), weight_format))
