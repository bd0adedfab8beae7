"""Which tensors of a checkpoint are quantised, under which names, and what its config then says.

Everything follows from the published weights: no calibration data, no random numbers, no threads that sum in another
order. Whoever derives a format from equal weights gets equal bits. Names and layouts are those that vLLM reads:
DeepSeek's for `fp8-block`, compressed-tensors' for the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl_core.errors import ModelError
from rl_core.formats import fp4, fp8
from rl_core.memory import copied, empty_tensor
from rl_core.types import WeightFormat

_LINEAR: Final = re.compile(r".*(?:_proj|\.experts\.\d+\.w[123])\.weight")
_SOURCES: Final = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS: Final = 1 << 18  # quantised at once, about: bounds the float32 copies
_ROWS: Final = 128  # and a multiple of these: whole blocks of every format


def quantised_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The matrices of linear layers, in name order; embeddings, heads, norms and routers stay as they are."""
    return sorted(name for name, tensor in tensors.items() if _LINEAR.fullmatch(name) and tensor.ndim == 2)


def serving_weights(tensors: Mapping[str, Tensor], weight_format: WeightFormat) -> dict[str, Tensor]:
    """The weights in a serving format, by checkpoint name; `tensors` are not changed, and shared where they stay.

    Raises: ModelError when a matrix holds NaN or infinity, is of a type that is no 16 or 32 bit float, or when a
    name that a scale needs is taken.
    """
    return _served(tensors, weight_format, take=tensors.__getitem__)


def serving_copy(tensors: Mapping[str, Tensor], weight_format: WeightFormat) -> dict[str, Tensor]:
    """The same in memory of its own, so that `tensors` may be changed afterwards."""
    made = serving_weights(tensors, weight_format)
    return {name: copied(tensor) if tensors.get(name) is tensor else tensor for name, tensor in made.items()}


def serving_weights_of(tensors: dict[str, Tensor], weight_format: WeightFormat) -> dict[str, Tensor]:
    """The same, emptying `tensors` on the way: what was quantised is let go before the next matrix is."""
    return _served(tensors, weight_format, take=tensors.pop)


def dequantised(
    tensors: Mapping[str, Tensor], weight_format: WeightFormat, *, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """What the quantised matrices stand for, as float32, by their names and `shapes` in the trained weights."""
    return {name: _dequantised(name, tensors, weight_format, shape) for name, shape in shapes.items()}


def serving_config(config: Mapping[str, Any], weight_format: WeightFormat) -> dict[str, Any]:
    """A model's `config.json` with what engines have to know of the format."""
    if weight_format is WeightFormat.BF16:
        return dict(config)
    return {**config, "quantization_config": _QUANTISATION[weight_format]}


def _served(
    tensors: Mapping[str, Tensor], weight_format: WeightFormat, *, take: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    matrices = [] if weight_format is WeightFormat.BF16 else quantised_names(tensors)
    rest = sorted(tensors.keys() - set(matrices))
    made: dict[str, Tensor] = {}
    for name in matrices:
        made.update(_quantised(name, take(name), weight_format))
    taken = sorted(made.keys() & set(rest))
    if taken:
        raise ModelError(f"{taken[0]} is in the checkpoint already: it is quantised; derive from the trained weights")
    return dict(sorted({**made, **{name: take(name) for name in rest}}.items()))


def _quantised(name: str, tensor: Tensor, weight_format: WeightFormat) -> dict[str, Tensor]:
    if tensor.dtype not in _SOURCES:
        raise ModelError(f"{name} is {tensor.dtype}: serving formats are derived from 16 or 32 bit floats")
    matrix = tensor.detach().cpu()
    rows_at_once = max(_ELEMENTS // max(matrix.shape[1], 1) // _ROWS, 1) * _ROWS
    pieces = torch.split(matrix, rows_at_once) or (matrix,)
    odd = sum(int((~torch.isfinite(piece)).sum()) for piece in pieces)
    if odd:
        raise ModelError(f"{name} holds {odd} elements that are NaN or infinite: no serving format has them")
    stem = name.removesuffix(".weight")
    if weight_format in _FP8_BLOCKS:
        rows, columns, scale = _FP8_BLOCKS[weight_format]
        made = _filled(lambda piece: fp8.quantise(piece, rows=rows, columns=columns), matrix, pieces, rows=rows)
        return dict(zip((name, f"{stem}.{scale}"), made, strict=True))
    packed = (f"{stem}.weight_packed", f"{stem}.weight_scale")
    if weight_format is WeightFormat.MXFP4:
        return dict(zip(packed, _filled(fp4.quantise_mx, matrix, pieces), strict=True))
    largest = torch.stack([piece.abs().amax().float() for piece in pieces if piece.numel()] or [torch.zeros(())]).amax()
    divisor = fp4.divisor_nv(largest)
    made = _filled(lambda piece: fp4.quantise_nv(piece, divisor=divisor), matrix, pieces)
    return {**dict(zip(packed, made, strict=True)), f"{stem}.weight_global_scale": divisor}


def _dequantised(name: str, tensors: Mapping[str, Tensor], weight_format: WeightFormat, shape: torch.Size) -> Tensor:
    stem, columns = name.removesuffix(".weight"), shape[1]
    if weight_format in _FP8_BLOCKS:
        rows, wide, scale = _FP8_BLOCKS[weight_format]
        return fp8.dequantise(tensors[name], tensors[f"{stem}.{scale}"], rows=rows, columns=wide)
    packed, scales = tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]
    if weight_format is WeightFormat.MXFP4:
        return fp4.dequantise_mx(packed, scales, columns=columns)
    return fp4.dequantise_nv(packed, scales, tensors[f"{stem}.weight_global_scale"], columns=columns)


def _filled(
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]], matrix: Tensor, pieces: Sequence[Tensor], *, rows: int = 1
) -> list[Tensor]:
    """What `quantise` makes of each piece, end to end. `rows`: how many share a scale."""
    made = [
        empty_tensor((-(-len(matrix) // height), *none.shape[1:]), none.dtype)
        for none, height in zip(quantise(matrix[:0].float()), (1, rows), strict=True)
    ]
    ends = [0, 0]
    for piece in pieces:
        for index, part in enumerate(quantise(piece.float())):
            made[index][ends[index] : ends[index] + len(part)] = part
            ends[index] += len(part)
    return made


# Rows and columns that share a scale (None: whole rows), and the scale's name.
_FP8_BLOCKS: Final[dict[WeightFormat, tuple[int, int | None, str]]] = {
    WeightFormat.FP8_CHANNEL: (1, None, "weight_scale"),
    WeightFormat.FP8_BLOCK: (fp8.BLOCK, fp8.BLOCK, "weight_scale_inv"),
}
_IGNORED: Final = ["lm_head", "re:.*\\.gate$"]


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _IGNORED,
    }


_FLOAT: Final = {"type": "float", "symmetric": True, "dynamic": False}
_QUANTISATION: Final[dict[WeightFormat, dict[str, Any]]] = {
    WeightFormat.FP8_BLOCK: {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
    },
    WeightFormat.FP8_CHANNEL: _compressed(
        "float-quantized",
        {**_FLOAT, "num_bits": 8, "strategy": "channel"},
        {**_FLOAT, "num_bits": 8, "strategy": "token", "dynamic": True},
    ),
    WeightFormat.MXFP4: _compressed(
        "mxfp4-pack-quantized", {**_FLOAT, "num_bits": 4, "strategy": "group", "group_size": fp4.MX_BLOCK}, None
    ),
    WeightFormat.NVFP4: _compressed(
        "nvfp4-pack-quantized",
        {**_FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": fp4.NV_BLOCK},
        None,
    ),
}
