"""Quantizers. Host memory; docs/number-formats.md has the formulas."""

from __future__ import annotations

import os
from typing import Any, Callable, List, NamedTuple, Optional, Tuple, Union

from . import _core
from ._arrays import Array, array, invalid
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
    values: Array,
    scheme: str,
    *,
    scale_rule: str = "ocp",
    scale_dtype: str = "f32",
    global_amax: Optional[float] = None,
) -> QuantizedMatrix:
    """One matrix (out, in), f32, bf16 or f16, in the weight format of a scheme.

    Args:
        values: the matrix.
        scheme: a name of schemes().
        scale_rule: of MXFP4 and MXFP8, "ocp", "even", "ceil" or "floor".
        scale_dtype: of the scales of int4 and int8 groups.
        global_amax: of NVFP4, whose gate and up share one; default: the matrix's.

    Raises:
        ValueError: for values that are not finite, or an unknown scheme.
    """
    return QuantizedMatrix(
        *_core.quantize_weights(array(values), scheme, scale_rule, scale_dtype, global_amax)
    )


def dequantize_weights(matrix: QuantizedMatrix, scheme: str, in_features: int) -> Tensor:
    """The values (out, in_features) as f32.

    Args:
        matrix: what quantize_weights() returns, or the parts as a checkpoint holds them.
        scheme: its scheme.
        in_features: columns of the matrix.

    Raises:
        ValueError: for shapes that do not fit.
    """
    try:
        values, scales, zero_points, global_scale = map(array, matrix)
    except (TypeError, ValueError):
        found = type(matrix).__name__
        raise invalid("matrix", f"matrix: was a {found}; must be a QuantizedMatrix") from None
    return _core.dequantize_weights(
        values, scales, zero_points, global_scale, scheme, in_features
    )


def quantize_activations(
    x: Array, scheme: str, *, scale: Optional[float] = None
) -> Tuple[Tensor, Tensor]:
    """Values and scales of x (rows, columns), f32, bf16 or f16, in a scheme's activation format.

    Args:
        x: the activations.
        scheme: a name of schemes().
        scale: of a static format, and the global scale of NVFP4.

    Raises:
        ValueError: for a scheme that leaves activations as they are.
    """
    return _core.quantize_activations(array(x), scheme, scale)


def quantize_checkpoint(
    checkpoint: Union[str, "os.PathLike[str]"],
    output: Union[str, "os.PathLike[str]"],
    scheme: str,
    *,
    layout: Optional[str] = None,
    scale_rule: str = "ocp",
    calibration: Optional[Union[str, "os.PathLike[str]"]] = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Optional[Callable[[int, int], None]] = None,
) -> int:
    """Writes an f32, bf16 or f16 checkpoint again with its routed experts quantized.

    Everything else of the model is copied.

    Args:
        checkpoint: a folder or a safetensors file.
        output: a folder that is new or empty; it appears complete or not at all.
        scheme: a name of schemes().
        layout: "gpt-oss", "fp8", "compressed-tensors", "modelopt", "gptq", "gptq_v2" or "awq";
            default: the scheme's usual one.
        scale_rule: of MXFP4 and MXFP8, "ocp", "even", "ceil" or "floor".
        calibration: a file with `hidden_states` for static activation scales; default:
            input.safetensors of the checkpoint.
        max_shard_bytes: of one file.
        progress: called with the bytes done and their total.

    Returns:
        The bytes written.

    Raises:
        ValueError: for a layout that cannot hold the scheme, weights that are not finite, or
            calibration for a scheme without static scales.
    """
    settings = {
        "scheme": scheme,
        "layout": layout or "",
        "scale_rule": scale_rule,
        "calibration": os.fspath(calibration) if calibration is not None else "",
        "max_shard_bytes": max_shard_bytes,
    }
    return _core.quantize_checkpoint(
        os.fspath(checkpoint), os.fspath(output), settings, progress
    )
