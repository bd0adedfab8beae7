import pytest
import torch
from blake3 import blake3
from weightpairs import make_weights

from rl_core.delta import weights_leaves, weights_root
from rl_core.errors import ModelError


def test_the_root_names_bits_names_dtypes_and_shapes():
    weights = make_weights()
    root = weights_root(weights)
    assert weights_root(dict(reversed(list(weights.items())))) == root
    name = "model.norm.weight"
    flipped = weights[name].clone()
    flipped.view(torch.int16)[3] ^= 1
    others = [
        weights | {name: flipped},
        {("other" if key == name else key): tensor for key, tensor in weights.items()},
        weights | {name: weights[name].reshape(4, 8)},
        weights | {name: weights[name].view(torch.float16)},
        {key: tensor for key, tensor in weights.items() if key != name},
        weights | {"more": torch.zeros(0)},
    ]
    roots = {weights_root(other) for other in others}
    assert len(roots) == len(others)
    assert root not in roots


def test_the_root_by_hand():
    tensor = torch.tensor([1, 2], dtype=torch.uint8)
    header = b'["a","U8",[2]]'
    leaf = blake3(
        len(header).to_bytes(4, "little") + header + blake3(b"\x01\x02").digest(),
        derive_key_context="slipway 2026 weights leaf 1",
    )
    root = blake3(leaf.digest(), derive_key_context="slipway 2026 weights root 1").hexdigest()
    assert weights_root({"a": tensor}) == root


def test_minus_zero_and_nan_payloads_are_other_weights():
    words = torch.tensor([[0x0000, 0x7FC0], [-0x8000, 0x7FC0], [0x0000, 0x7FC1]], dtype=torch.int16)
    assert len({weights_root({"w": row.view(torch.bfloat16)}) for row in words}) == 3


def test_threads_and_memory_layout_do_not_matter():
    weights = make_weights()
    assert weights_leaves(weights, threads=3, hash_threads=2) == weights_leaves(weights)
    square = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    assert weights_root({"w": square.t()}) == weights_root({"w": square.t().contiguous()})


def test_unshippable_tensors_are_refused():
    with pytest.raises(ModelError, match="complex64"):
        weights_root({"w": torch.zeros(2, dtype=torch.complex64)})
