"""Small weights that change as training changes them: the chance halves with every binade of the magnitude."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_core.delta import Base, ShadowWeights, Target, publish_delta, publish_snapshot, read_manifest
from rl_core.store import ObjectStore, open_store
from rl_core.types import VersionRef


def make_weights(*, seed: int = 0, dtype: torch.dtype = torch.bfloat16, layers: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(dtype)

    weights = {"model.embed_tokens.weight": normal(64, 32), "model.norm.weight": torch.ones(32, dtype=dtype)}
    for layer in range(layers):
        weights[f"model.layers.{layer}.mlp.up_proj.weight"] = normal(48, 32)
        weights[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(32, dtype=dtype)
    return weights


def step(weights: dict[str, torch.Tensor], *, seed: int, lr: float = 1e-4) -> dict[str, torch.Tensor]:
    """One optimiser step with updates of size lr·u on an fp32 master, rounded back: small weights move most."""
    generator = torch.Generator().manual_seed(seed)
    stepped = {}
    for name, tensor in weights.items():
        update = (
            lr * torch.randn(tensor.shape, generator=generator).sign() * torch.rand(tensor.shape, generator=generator)
        )
        stepped[name] = (tensor.float() + update).to(tensor.dtype)
    return stepped


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return sorted(left) == sorted(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].reshape(-1).view(torch.uint8).equal(right[name].reshape(-1).view(torch.uint8))
        for name in left
    )


def replace(store: ObjectStore, key: str, data: bytes | None) -> None:
    """What a broken or a hostile store does: other bytes under the key, or none."""
    store.delete(key)
    if data is not None:
        store.put(key, data)


class Lineage:
    """A published chain: a snapshot of version 0-0, then one delta a version. `weights[n]` are version 0-n's."""

    def __init__(
        self, location: Path | str, *, versions: int, dtype: torch.dtype = torch.bfloat16, layers: int = 3
    ) -> None:
        self.store = open_store(location)
        self.weights = [make_weights(dtype=dtype, layers=layers)]
        prefix = "snapshots/lin/0-0/0"
        self.published = [
            publish_snapshot(self.store, self.weights[0], key_prefix=prefix, version=VersionRef("lin", 0, 0))
        ]
        for number in range(1, versions + 1):
            self.publish(step(self.weights[-1], seed=number), onto=number - 1)

    def publish(self, new: dict[str, torch.Tensor], *, onto: int, fence: int = 0) -> int:
        number = len(self.weights)
        base = Base(f"lin:0-{onto}", self.published[onto].root, self.published[onto].manifest_key)
        published = publish_delta(
            self.store, old=self.weights[onto], new=new, version=VersionRef("lin", 0, number), base=base, fence=fence
        )
        self.weights.append(new)
        self.published.append(published)
        return number

    def snapshot(self, number: int) -> str:
        prefix = f"snapshots/lin/0-{number}/0"
        version = VersionRef("lin", 0, number)
        return publish_snapshot(self.store, self.weights[number], key_prefix=prefix, version=version).manifest_key

    def segment(self, number: int) -> str:
        """Key of the first segment of a version."""
        return read_manifest(self.store, self.published[number].manifest_key).segments[0].key

    def shadow(self, number: int) -> ShadowWeights:
        key = self.published[number].manifest_key
        return ShadowWeights.from_tensors(self.weights[number], version=f"lin:0-{number}", manifest_key=key)

    def target(self, number: int, *, snapshot: str | None = None) -> Target:
        published = self.published[number]
        return Target(
            version=f"lin:0-{number}", root=published.root, manifest=published.manifest_key, snapshot=snapshot
        )
