"""Quantized linear layers as their formats are published, in NumPy alone.

Each function makes one of random codes: the parts that a file holds, by suffix, as (dtype, array),
and the weights (N, K) that they stand for. ACTIVATIONS: what a format makes of rows before a layer.
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = np.arange(256)
E2M1_CODES = np.where(CODES & 8, -1.0, 1.0) * E2M1[CODES & 7]
EXPONENT, MANTISSA = CODES >> 3 & 15, CODES & 7
E4M3_CODES = (np.where(CODES & 128, -1.0, 1.0) *
              np.where(EXPONENT, (1 + MANTISSA / 8) * 2.0 ** (EXPONENT - 7), MANTISSA / 8 * 2.0 ** -6))
E4M3_CODES[[127, 255]] = np.nan


def nearest(values, magnitudes):
    """Ties go to the even code, larger values to the largest one."""
    x = np.abs(values).astype(np.float64)
    above = np.searchsorted(magnitudes, x).clip(0, len(magnitudes) - 1)
    below = np.maximum(above - 1, 0)
    down, up = x - magnitudes[below], magnitudes[above] - x
    lower = (down < up) | ((down == up) & (below % 2 == 0))
    return np.copysign(magnitudes[np.where(lower, below, above)], values).astype(np.float32)


def to_e4m3(values):
    return nearest(values, E4M3_CODES[:127])


def bf16(values):
    """Of values that bf16 holds exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return "BF16", (bits >> 16).astype(np.uint16)


def spread(scales, *block):
    """Each scale at all elements of its block."""
    for axis, size in enumerate(block):
        scales = np.repeat(scales, size, axis)
    return scales


def sixteenths(rng, *shape):
    return rng.integers(-8, 9, shape) / 16


def plain(rng, n, k):
    weights = sixteenths(rng, n, k)
    return {"weight": bf16(weights)}, weights


def plain_f32(rng, n, k):
    weights = sixteenths(rng, n, k).astype(np.float32)
    return {"weight": ("F32", weights)}, weights.astype(np.float64)


def e4m3_codes(rng, n, k):
    """Of usual size: no NaN, and few small ones."""
    return (rng.integers(32, 120, (n, k)) + 128 * rng.integers(0, 2, (n, k))).astype(np.uint8)


def fp8_blocks(rng, n, k):
    codes = e4m3_codes(rng, n, k)
    scales = rng.uniform(0.001, 0.003, (n // 128, k // 128)).astype(np.float32)
    weights = E4M3_CODES[codes] * spread(scales.astype(np.float64), 128, 128)
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}, weights


def fp8_blocks_e8m0(rng, n, k):
    """DeepSeek-V4."""
    codes = e4m3_codes(rng, n, k)
    scales = rng.integers(116, 120, (n // 128, k // 128)).astype(np.uint8)
    weights = E4M3_CODES[codes] * spread(2.0 ** (scales.astype(float) - 127), 128, 128)
    return {"weight": ("F8_E4M3", codes), "scale": ("F8_E8M0", scales)}, weights


def fp8_channels(rng, n, k):
    codes = e4m3_codes(rng, n, k)
    scales = rng.integers(1, 9, (n, 1)) / 2048
    return ({"weight": ("F8_E4M3", codes), "weight_scale": bf16(scales)},
            E4M3_CODES[codes] * scales)


def e2m1_pairs(rng, n, k):
    packed = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    return packed, E2M1_CODES[np.stack([packed & 15, packed >> 4], -1).reshape(n, k)]


def mxfp4_i8(rng, n, k):
    """DeepSeek-V4, expert_dtype fp4."""
    packed, values = e2m1_pairs(rng, n, k)
    scales = rng.integers(122, 126, (n, k // 32)).astype(np.uint8)
    return ({"weight": ("I8", packed), "scale": ("F8_E8M0", scales)},
            values * spread(2.0 ** (scales.astype(float) - 127), 1, 32))


def nvfp4(rng, n, k):
    """ModelOpt."""
    packed, values = e2m1_pairs(rng, n, k)
    scales = rng.integers(64, 120, (n, k // 16)).astype(np.uint8)
    second = np.float32(rng.uniform(0.0005, 0.001))
    parts = {"weight": ("U8", packed), "weight_scale": ("F8_E4M3", scales),
             "weight_scale_2": ("F32", second)}
    return parts, values * spread(E4M3_CODES[scales], 1, 16) * np.float64(second)


def nvfp4_with_inputs(rng, n, k):
    parts, weights = nvfp4(rng, n, k)
    return parts | {"input_scale": ("F32", np.float32(0.01))}, weights


def words(codes, axis, order=range(8)):
    """Eight 4-bit codes to a word."""
    codes = np.moveaxis(codes, axis, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    packed = sum(codes[..., source] << (4 * at) for at, source in enumerate(order))
    return np.moveaxis(packed, -1, axis).astype(np.uint32).view(np.int32)


def gptq(rng, n, k, group=32):
    """Zero points are stored minus one."""
    codes, zeros = rng.integers(0, 16, (k, n)), np.full((k // group, n), 7)
    scales = (rng.integers(1, 9, (k // group, n)) / 64).astype(np.float16)
    weights = (codes - 8) * spread(scales.astype(float), group)
    return {"qweight": ("I32", words(codes, 0)), "qzeros": ("I32", words(zeros, 1)),
            "scales": ("F16", scales), "g_idx": ("I32", (np.arange(k) // group).astype(np.int32))
            }, weights.T


def gptq_one_group(rng, n, k):
    """desc_act with rows of one group, and a bias of zeros."""
    parts, weights = gptq(rng, n, k, k)
    return parts | {"bias": ("F16", np.zeros(n, np.float16))}, weights


def awq(rng, n, k, group=32):
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = (rng.integers(1, 9, (k // group, n)) / 64).astype(np.float16)
    weights = (codes - spread(zeros, group)) * spread(scales.astype(float), group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": ("I32", words(codes, 1, order)), "qzeros": ("I32", words(zeros, 1, order)),
            "scales": ("F16", scales)}, weights.T


# --------------------------------------------------------------------------------------------------


def largest_of(rows, group):
    groups = rows.reshape(*rows.shape[:-1], -1, group)
    return groups, np.abs(groups).max(-1, keepdims=True)


def e4m3_groups(rows, power_of_two=False):
    groups, largest = largest_of(rows, 128)
    scales = np.maximum(largest, np.float32(1e-10)) / np.float32(448)
    if power_of_two:
        scales = np.exp2(np.ceil(np.log2(scales.astype(np.float64)))).astype(np.float32)
    return (to_e4m3(groups / scales).astype(np.float64) * scales).reshape(rows.shape)


def e4m3_tokens(rows):
    scales = np.maximum(np.abs(rows).max(-1, keepdims=True) / np.float32(448),
                        np.float32(1 / (448 * 512)))
    return to_e4m3(rows / scales).astype(np.float64) * scales


def nvfp4_rows(rows):
    groups, largest = largest_of(rows, 16)
    second = np.float32(0.01)
    inverse = np.float32(1) / second
    scales = to_e4m3(inverse * (largest * np.float32(1 / 6)))
    with np.errstate(divide="ignore"):
        factors = np.where(scales, np.float32(1) / (scales * (np.float32(1) / inverse)), 0)
    codes = nearest(groups * factors.astype(np.float32), E2M1)
    return (codes.astype(np.float64) * scales * np.float64(second)).reshape(rows.shape)


ACTIVATIONS = {
    fp8_blocks: e4m3_groups,
    fp8_blocks_e8m0: lambda rows: e4m3_groups(rows, power_of_two=True),
    fp8_channels: e4m3_tokens,
    nvfp4_with_inputs: nvfp4_rows,
}
