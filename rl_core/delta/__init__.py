"""Weights as versions: named by a Merkle root, published as snapshots and lossless deltas, verified on every apply.

`publish_snapshot` and `publish_delta` write immutable objects; `ShadowWeights` and `reconcile` bring a replica to a
`Target` by the cheapest path and report which tensors changed.
"""

from rl_core.delta.manifest import Base, Manifest, ManifestKind, read_manifest, version_prefix
from rl_core.delta.parts import merge_parts
from rl_core.delta.path import Hop, HopKind, Target, plan_path
from rl_core.delta.publisher import Published, publish_delta, publish_snapshot
from rl_core.delta.receiver import Progress, Reconciled, ReconcilePhase, reconcile
from rl_core.delta.root import weights_leaves, weights_root
from rl_core.delta.shadow import ShadowWeights

__all__ = [
    "Base",
    "Hop",
    "HopKind",
    "Manifest",
    "ManifestKind",
    "Progress",
    "Published",
    "ReconcilePhase",
    "Reconciled",
    "ShadowWeights",
    "Target",
    "merge_parts",
    "plan_path",
    "publish_delta",
    "publish_snapshot",
    "read_manifest",
    "reconcile",
    "version_prefix",
    "weights_leaves",
    "weights_root",
]
