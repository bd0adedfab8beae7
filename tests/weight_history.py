"""Versions whose weights really stand in a store: small enough that a history of them takes a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from controlplane.models import PolicyVersion, Run, WorkUnit
from controlplane.selectors.publications import reading_of
from controlplane.services.catalog import model_register
from controlplane.services.runs import run_create
from controlplane.services.versions import PublishedWeights, version_begin, version_commit
from controlplane.states import WorkKind, WorkState
from rl_core.delta import Base, ShadowWeights, Target, publish_delta, publish_snapshot, reconcile
from rl_core.store import ObjectStore
from rl_core.types import VersionRef, WeightFormat
from tests.domain_factories import TESTER, make_catalog, make_cluster, make_project, make_spec
from workers.base import work_on
from workers.derive import derive

Weights = dict[str, torch.Tensor]
MATRIX = "model.layers.0.mlp.up_proj.weight"


def make_weights(seed: int) -> Weights:
    """One matrix of a linear layer and one vector."""
    generator = torch.Generator().manual_seed(seed)
    return {
        MATRIX: torch.randn(24, 16, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(16, generator=generator).bfloat16(),
    }


class WeightHistory:
    """A project with one model; runs of it that publish what they "train", and readers of that."""

    def __init__(self, store: ObjectStore, folder: Path, *, seed: int = 0) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.project = make_project()
        make_catalog(self.project)
        make_cluster(self.project, slug="east")
        first = make_weights(seed)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        save_file(first, str(folder / "model.safetensors"))
        whole = publish_snapshot(store, first, key_prefix=f"snapshots/{seed}", version=VersionRef("model", 0, 0))
        self.model = model_register(
            project=self.project,
            slug="small",
            folder=str(folder),
            root=whole.root,
            manifest_key=whole.manifest_key,
            full_bytes=whole.full_bytes,
            parameters=whole.elements,
            architecture="LlamaForCausalLM",
            actor=TESTER,
        )
        self.weights: dict[str, Weights] = {whole.root: first}

    def run(self, *, parent: PolicyVersion | None = None, **stage: Any) -> Run:
        """A run from the model, or a fork."""
        spec = make_spec(**stage) | {"model": "small"}
        return run_create(project=self.project, name="a run", spec=spec, actor=TESTER, parent_version=parent)

    def commit(self, run: Run, *, fence: int = 1) -> PolicyVersion:
        """Publish and commit the next version of the run: a few elements of the head's weights are other ones."""
        run.lineage.refresh_from_db()
        head = run.lineage.head
        assert head is not None
        lineage = run.lineage
        begun = version_begin(lineage=lineage, epoch=0, number=head.number + 1, parent=head, fence=fence)
        weights = self.publish(begun, fence=fence)
        return version_commit(version=begun, fence=fence, weights=weights, run=run, actor=TESTER)

    def publish(self, begun: PolicyVersion, *, fence: int) -> PublishedWeights:
        """What a trainer does for a version that was begun, up to the commit."""
        head = begun.parent
        assert head is not None
        old = self.weights[head.root]
        new = self._trained(old)
        base = Base(str(head.ref), head.root, head.manifest_key)
        made = publish_delta(self.store, old=old, new=new, version=begun.ref, base=base, fence=fence)
        self.weights[made.root] = new
        return PublishedWeights(
            root=made.root,
            manifest_key=made.manifest_key,
            delta_bytes=made.bytes,
            full_bytes=made.full_bytes,
            changed_elements=made.changed_elements,
            elements=made.elements,
        )

    def _trained(self, old: Weights) -> Weights:
        new = {name: tensor.clone() for name, tensor in old.items()}
        for _ in range(self.random.randint(1, 6)):
            new[MATRIX][self.random.randrange(24), self.random.randrange(16)] += 1 + self.random.random()
        return new

    def derive_all(self) -> int:
        """Let a worker make every publication that is planned; how many."""
        units = list(WorkUnit.objects.filter(kind=WorkKind.DERIVE, state=WorkState.QUEUED, project=self.project))
        for unit in units:
            work_on(unit.pk, derive)
        return len(units)

    def read(
        self, version: PolicyVersion, *, holding: PolicyVersion | None = None, form: WeightFormat = WeightFormat.BF16
    ) -> ShadowWeights:
        """A reader that comes to the version from what it holds, or from weights that lead nowhere."""
        held = make_weights(999) if holding is None else self.weights[holding.root]
        name, key = ("", None) if holding is None else (str(holding.ref), holding.manifest_key)
        shadow = ShadowWeights.from_tensors(held, version=name, manifest_key=key)
        reading = reading_of(version, form, since=holding)
        assert reading is not None, f"nothing leads to {version.ref}"
        target = Target(
            version=str(version.ref),
            root=reading.root,
            manifest=reading.manifest,
            snapshot=reading.snapshot or None,
            deltas=reading.deltas,
        )
        reconcile(self.store, shadow, target)
        assert shadow.root == reading.root
        return shadow
