"""Serving formats: weights as engines serve them, derived from published weights alone, the same bits wherever.

`serving_weights` quantises the matrices of linear layers and leaves every other tensor as it is. What comes out has a
root of its own and is published and moved as any other weights are.
"""

from rl_core.formats.derive import (
    dequantised,
    quantised_names,
    serving_config,
    serving_copy,
    serving_weights,
    serving_weights_of,
)

__all__ = [
    "dequantised",
    "quantised_names",
    "serving_config",
    "serving_copy",
    "serving_weights",
    "serving_weights_of",
]
