"""Quantizers. Host memory; docs/number-formats.md has the formulas."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

from . import _core
from ._arrays import array
from ._core import Tensor


class QuantizedMatrix(NamedTuple):
    """A weight matrix as published checkpoints hold it; what the format lacks is None."""

    values: Tensor
    """Codes: e4m3, i8; FP4 as u8 (out, in / 2); 4- and 8-bit integers as i32 words."""
    scales: Optional[Tensor]
    zero_points: Optional[Tensor]
    global_scale: Optional[Tensor]


def schemes() -> List[str]:
    """Names of all quantization schemes."""
    return _core.schemes()


def quantize_weights(
    values: Any,
    scheme: str,
    *,
    scale_rule: str = "ocp",
    scale_dtype: str = "f32",
    global_amax: Optional[float] = None,
) -> QuantizedMatrix:
    """One matrix (out, in), f32, bf16 or f16, in the weight format of a scheme.

    scale_rule: of MXFP4 and MXFP8, "ocp", "even", "ceil" or "floor". scale_dtype: of the scales of
    int4 and int8 groups. global_amax: of NVFP4, whose gate and up share one; default: the matrix's.

    Raises ValueError for values that are not finite, or an unknown scheme.
    """
    return QuantizedMatrix(
        *_core.quantize_weights(array(values), scheme, scale_rule, scale_dtype, global_amax)
    )


def dequantize_weights(matrix: QuantizedMatrix, scheme: str, in_features: int) -> Tensor:
    """The values (out, in_features) as f32. Raises ValueError for shapes that do not fit."""
    values, scales, zero_points, global_scale = (array(part) for part in matrix)
    return _core.dequantize_weights(
        values, scales, zero_points, global_scale, scheme, in_features
    )


def quantize_activations(
    x: Any, scheme: str, *, scale: Optional[float] = None
) -> Tuple[Tensor, Tensor]:
    """Values and scales of x (rows, columns), f32, bf16 or f16, in a scheme's activation format.

    scale: of a static format, and the global scale of NVFP4. Raises ValueError for a scheme that
    leaves activations as they are.
    """
    return _core.quantize_activations(array(x), scheme, scale)
