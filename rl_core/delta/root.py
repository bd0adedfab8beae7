"""The name of a set of weights: a blake3 Merkle root over its tensors.

leaf = blake3(name, dtype, shape, blake3(bytes)); root = blake3(leaves in order of name). Equal roots mean equal
bits, names, dtypes and shapes. A leaf depends on its tensor alone, so an update rehashes only what it touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np
import torch
from blake3 import blake3

from rl_core.delta.words import Tensors, dtype_tag, words_of

# Domain separation: a leaf can never be presented as a root, nor either as the digest of a segment.
_LEAF_CONTEXT: Final = "slipway 2026 weights leaf 1"
_ROOT_CONTEXT: Final = "slipway 2026 weights root 1"


def leaf_hash(name: str, tensor: torch.Tensor, *, hash_threads: int = 1) -> str:
    """The leaf of one tensor, 64 hex digits. Raises: ModelError for a tensor that cannot be shipped."""
    content = blake3(max_threads=hash_threads)
    content.update(words_of(tensor.cpu().contiguous()).view(np.uint8).data)
    header = msgspec.json.encode([name, dtype_tag(tensor), list(tensor.shape)])
    leaf = blake3(len(header).to_bytes(4, "little") + header, derive_key_context=_LEAF_CONTEXT)
    leaf.update(content.digest())
    return str(leaf.hexdigest())


def weights_leaves(tensors: Tensors, *, threads: int = 1, hash_threads: int = 1) -> dict[str, str]:
    """Leaves by name. `threads` hashes tensors side by side, `hash_threads` lets blake3 split each one."""
    names = sorted(tensors)
    if threads == 1:
        return {name: leaf_hash(name, tensors[name], hash_threads=hash_threads) for name in names}
    with ThreadPoolExecutor(threads) as pool:
        leaves = pool.map(lambda name: leaf_hash(name, tensors[name], hash_threads=hash_threads), names)
        return dict(zip(names, leaves, strict=True))


def root_of_leaves(leaves: Mapping[str, str]) -> str:
    """The root over leaves by name, 64 hex digits."""
    tree = blake3(derive_key_context=_ROOT_CONTEXT)
    for name in sorted(leaves):
        tree.update(bytes.fromhex(leaves[name]))
    return str(tree.hexdigest())


def weights_root(tensors: Tensors, *, threads: int = 1, hash_threads: int = 1) -> str:
    """The Merkle root that names these weights, 64 hex digits. Raises: ModelError."""
    return root_of_leaves(weights_leaves(tensors, threads=threads, hash_threads=hash_threads))
