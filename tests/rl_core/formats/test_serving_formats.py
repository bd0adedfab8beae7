"""Serving formats: what each element becomes, by values worked out here, and the same bits whoever derives them."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.delta import Base, ShadowWeights, Target, publish_delta, publish_snapshot, reconcile, weights_root
from rl_core.errors import ModelError
from rl_core.formats import (
    dequantised,
    quantised_names,
    serving_config,
    serving_copy,
    serving_weights,
    serving_weights_of,
)
from rl_core.store import open_store
from rl_core.types import VersionRef, WeightFormat

NAME = "model.layers.0.mlp.up_proj.weight"
STEM = NAME.removesuffix(".weight")
QUANTISED = [name for name in WeightFormat if name is not WeightFormat.BF16]
# Block height and width of each format's scales.
BLOCKS = {
    WeightFormat.FP8_CHANNEL: (1, None),
    WeightFormat.FP8_BLOCK: (128, 128),
    WeightFormat.MXFP4: (1, 32),
    WeightFormat.NVFP4: (1, 16),
}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_values():
    """Every finite magnitude of E4M3, by its code: four bits of exponent, three of fraction, bias 7, no infinity."""
    return [
        math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10) for code in range(0x7F)
    ]


def nearest(value, magnitudes):
    """The code of the nearest magnitude, ties to the even code, with the sign as the highest bit."""
    size = abs(value)
    best = min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - size), code % 2))
    return best, math.copysign(1, value) < 0


def weights(matrix, **more):
    return {NAME: matrix, "model.norm.weight": torch.ones(4, dtype=torch.bfloat16), **more}


def random_matrix(rows, columns, *, seed=0, spread=0.02):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * spread).bfloat16()


def test_every_e4m3_number_comes_out_as_it_is_and_what_lies_between_goes_to_the_nearest():
    table = e4m3_values()
    between = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    above = [value * (1 + 2**-7) for value in between if value]
    values = [448.0, *table, *between, *above]
    values += [-value for value in values]
    matrix = torch.tensor([values], dtype=torch.float32)  # its largest element makes the scale 1
    made = serving_weights({NAME: matrix}, WeightFormat.FP8_CHANNEL)
    codes = made[NAME].view(torch.uint8)[0].tolist()
    assert made[f"{STEM}.weight_scale"].tolist() == [[1.0]]
    for value, code in zip(values, codes, strict=True):
        expected, negative = nearest(value, table)
        assert code == expected | (0x80 if negative else 0), value


def test_every_e2m1_number_comes_out_as_it_is_and_what_lies_between_goes_to_the_nearest():
    between = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    values = [4.0, *E2M1, *between, 0.2, 0.3, 0.7, 1.3, 2.4, 3.6, 4.9]
    values = [*values, *[-value for value in values], 7.0, -7.5]
    for start in range(0, len(values), 30):
        row = [4.0, 4.0, *values[start : start + 30]]
        packed = serving_weights({NAME: torch.tensor([row])}, WeightFormat.MXFP4)[f"{STEM}.weight_packed"][0].tolist()
        codes = [code for byte in packed for code in (byte & 15, byte >> 4)][: len(row)]
        for value, code in zip(row, codes, strict=True):
            expected, negative = nearest(min(6.0, max(-6.0, value)), E2M1)
            assert code == expected | (8 if negative else 0), value


@pytest.mark.parametrize(
    ("largest", "fp8", "mx"),
    [
        (448.0, 1.0, 64.0),
        (449.0, 2.0, 64.0),
        (224.0, 0.5, 32.0),
        (0.0, 2.0**-126, 2.0**-126),
        (1.0, 2.0**-8, 0.25),
        (1.75, 2.0**-8, 0.25),
        (1.76, 2.0**-7, 0.25),
        (2.0**-130, 2.0**-126, 2.0**-126),
        (2.0**127, 2.0**119, 2.0**125),
    ],
)
def test_scales_are_powers_of_two_that_the_largest_element_fits(largest, fp8, mx):
    matrix = torch.tensor([[largest / 4, -largest, 0.0]])
    made = serving_weights({NAME: matrix}, WeightFormat.FP8_BLOCK)
    assert made[f"{STEM}.weight_scale_inv"].item() == fp8
    assert made[NAME].float().isfinite().all()
    scale = serving_weights({NAME: matrix}, WeightFormat.MXFP4)[f"{STEM}.weight_scale"].item()
    assert 2.0 ** (scale - 127) == mx


def test_nvfp4_by_hand():
    row = [2688.0] + [0.0] * 15 + [6.0, 3.0, -1.5] + [0.0] * 13 + [0.0] * 16
    made = serving_weights({NAME: torch.tensor([row])}, WeightFormat.NVFP4)
    assert made[f"{STEM}.weight_global_scale"].tolist() == [1.0]
    assert made[f"{STEM}.weight_scale"].float().tolist() == [[448.0, 1.0, 2.0**-9]]
    packed = [7, 0, 0, 0, 0, 0, 0, 0, 7 | 5 << 4, 8 | 3, 0, 0, 0, 0, 0, 0] + [0] * 8
    assert made[f"{STEM}.weight_packed"].tolist() == [packed]


def test_linear_layers_are_quantised_and_nothing_else():
    tensors = {
        "model.embed_tokens.weight": torch.ones(8, 4),
        "lm_head.weight": torch.ones(8, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(4),
        "model.layers.0.block_sparse_moe.gate.weight": torch.ones(2, 4),
        "model.layers.0.block_sparse_moe.experts.1.w2.weight": torch.ones(4, 4),
        "model.layers.0.input_layernorm.weight": torch.ones(4),
    }
    names = [
        "model.layers.0.block_sparse_moe.experts.1.w2.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ]
    assert quantised_names(tensors) == names
    made = serving_weights(tensors, WeightFormat.MXFP4)
    assert all(made[name] is tensor for name, tensor in tensors.items() if name not in names)
    assert not set(names) & set(made)


sizes = st.integers(0, 7) | st.sampled_from([15, 16, 17, 31, 33, 64, 127, 128, 129, 200])


@given(rows=sizes, columns=sizes, weight_format=st.sampled_from(QUANTISED), data=st.data())
def test_every_shape_keeps_its_bounds(rows, columns, weight_format, data):
    """Odd sizes, empty ones, blocks of zeros, blocks far apart in magnitude: close to what was there, and finite."""
    matrix = random_matrix(rows, columns, seed=data.draw(st.integers(0, 2**16)))
    if rows and columns:
        matrix[data.draw(st.integers(0, rows - 1))] = 0
        matrix[:, data.draw(st.integers(0, columns - 1))] *= 2.0 ** data.draw(st.integers(-60, 60))
    made = serving_weights(weights(matrix), weight_format)
    back = dequantised(made, weight_format, shapes={NAME: matrix.shape})[NAME]
    assert back.shape == matrix.shape
    assert back.isfinite().all()
    height, width = BLOCKS[weight_format]
    width = width or max(1, columns)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            before = matrix[top : top + height, left : left + width].double()
            after = back[top : top + height, left : left + width].double()
            largest = before.abs().max()
            # Half a step of the largest element: 2^-4 of it in E4M3, 1/6 in E2M1, which saturates up to a quarter.
            bound = largest * (2**-4 if weight_format in (WeightFormat.FP8_BLOCK, WeightFormat.FP8_CHANNEL) else 0.25)
            if weight_format is WeightFormat.NVFP4:  # a block's own scale ends at 2^-9 of the tensor's
                bound = bound + matrix.double().abs().max() * 3 * 2.0**-9 / 1344
            assert (before - after).abs().max() <= bound + 2.0**-120
            if largest == 0:
                assert not after.any()


@pytest.mark.parametrize("weight_format", QUANTISED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_no_format_holds_is_refused_by_name(weight_format, bad):
    matrix = random_matrix(8, 8)
    matrix[3, 3] = bad
    with pytest.raises(ModelError, match=r"up_proj\.weight holds 1 elements that are NaN or infinite"):
        serving_weights(weights(matrix), weight_format)


def test_weights_that_are_quantised_already_are_refused():
    with pytest.raises(ModelError, match="16 or 32 bit floats"):
        serving_weights(weights(random_matrix(4, 4).to(torch.float8_e4m3fn)), WeightFormat.FP8_BLOCK)
    taken = {f"{STEM}.weight_scale": torch.ones(1)}
    with pytest.raises(ModelError, match="quantised"):
        serving_weights(weights(random_matrix(4, 4), **taken), WeightFormat.MXFP4)


@pytest.mark.parametrize("weight_format", QUANTISED)
def test_a_tensor_of_many_parts_comes_out_as_one(weight_format, monkeypatch):
    matrix = random_matrix(300, 40)
    whole = serving_weights(weights(matrix), weight_format)
    monkeypatch.setattr("rl_core.formats.derive._ROWS", 128)
    assert weights_root(serving_weights(weights(matrix), weight_format)) == weights_root(whole)


def trained_further(matrix, *, seed):
    """A step as training takes it: a few elements move by a unit in the last place, large ones less often."""
    words = matrix.view(torch.int16).clone()
    generator = torch.Generator().manual_seed(seed)
    moved = torch.rand(matrix.shape, generator=generator) < 0.02
    words[moved] += torch.randint(0, 2, (int(moved.sum()),), generator=generator, dtype=torch.int16) * 2 - 1
    return words.view(torch.bfloat16)


@pytest.mark.parametrize("weight_format", QUANTISED)
def test_publisher_and_receiver_derive_the_same_bits_and_the_delta_carries_them(tmp_path, weight_format):
    """One derives from the weights it trained, one from bf16 that came by deltas, one holds what came in the format."""
    store = open_store(tmp_path)
    old = weights(random_matrix(130, 200, seed=1))
    new = {**old, NAME: trained_further(old[NAME], seed=2)}
    first, second = VersionRef("lin", 0, 0), VersionRef("lin", 0, 1)
    targets = {}
    for kind in (WeightFormat.BF16, weight_format):
        made_old, made_new = serving_weights(old, kind), serving_weights(new, kind)
        whole = publish_snapshot(store, made_old, key_prefix=f"snapshots/{kind}", version=first)
        delta = publish_delta(
            store,
            old=made_old,
            new=made_new,
            version=second,
            base=Base(str(first), whole.root, whole.manifest_key),
            fence=0,
            key_prefix=f"lineages/lin/0-1/{kind}",
        )
        targets[kind] = Target(version=str(second), root=delta.root, manifest=delta.manifest_key)
        assert delta.bytes < whole.bytes
    plain = ShadowWeights.from_tensors(old, version=str(first))
    reconcile(store, plain, targets[WeightFormat.BF16])
    served = ShadowWeights.from_tensors(serving_weights(old, weight_format), version=str(first))
    reconcile(store, served, targets[weight_format])
    assert weights_root(serving_weights(plain.tensors, weight_format)) == served.root == targets[weight_format].root
    assert served.root != plain.root


def test_engines_are_told_of_the_format():
    config = {"model_type": "llama"}
    assert serving_config(config, WeightFormat.BF16) == config
    block = serving_config(config, WeightFormat.FP8_BLOCK)["quantization_config"]
    assert (block["quant_method"], block["weight_block_size"]) == ("fp8", [128, 128])
    forms = {name: serving_config(config, name)["quantization_config"].get("format") for name in QUANTISED}
    assert forms == {
        WeightFormat.FP8_BLOCK: None,
        WeightFormat.FP8_CHANNEL: "float-quantized",
        WeightFormat.MXFP4: "mxfp4-pack-quantized",
        WeightFormat.NVFP4: "nvfp4-pack-quantized",
    }


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_a_copy_stands_apart_and_a_source_is_emptied_on_the_way(weight_format):
    source = weights(random_matrix(300, 96))
    wanted = {name: tensor.clone() for name, tensor in serving_weights(source, weight_format).items()}
    copy = serving_copy(source, weight_format)
    made = serving_weights_of(dict(source), weight_format)
    for tensor in source.values():
        tensor.add_(1)
    assert weights_root(copy) == weights_root(wanted) != weights_root(serving_weights(source, weight_format))
    # What was quantised is new memory; what stays is handed on.
    assert made.keys() == wanted.keys()
    assert made["model.norm.weight"] is source["model.norm.weight"]
    emptied = dict(source)
    serving_weights_of(emptied, weight_format)
    assert emptied == {}


@pytest.mark.parametrize("weight_format", QUANTISED)
def test_how_many_rows_are_quantised_at_once_changes_no_bit(weight_format, monkeypatch):
    source = weights(random_matrix(700, 160, spread=3.0))
    whole = serving_weights(source, weight_format)
    monkeypatch.setattr("rl_core.formats.derive._ELEMENTS", 1)
    assert weights_root(serving_weights(source, weight_format)) == weights_root(whole)
