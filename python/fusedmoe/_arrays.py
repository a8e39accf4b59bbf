"""Arrays of other packages: what the extension can import, and outputs of the caller's kind."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any, Callable, Dict, FrozenSet, Iterable, Mapping, Optional, Union

from . import _core
from ._core import Tensor

# Types of ml_dtypes and PyTorch: the NumPy type of the same width, and ours. ml_dtypes has no
# DLPack for them, nor has every PyTorch for those of 8 bits.
_ML_DTYPES = {
    "bfloat16": ("int16", "bf16"),
    "float8_e4m3fn": ("uint8", "e4m3"),
    "float8_e5m2": ("uint8", "e5m2"),
    "float8_e8m0fnu": ("uint8", "e8m0"),
}
Array = Any
"""An array of NumPy, PyTorch, CuPy, JAX or anything else with DLPack, or a Tensor."""
DTypeLike = Any
"""A name, as "f32" or "bf16", or a dtype of PyTorch or NumPy."""
DeviceLike = Any
"""A name, as "cpu" or "cuda:0", or a device of PyTorch."""
Path = Union[str, os.PathLike[str]]
"""Of a file or a folder."""
_TORCH_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def _torch_of(x: Any) -> Any:
    """The torch module if x is one of its tensors."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def array(x: Any) -> Any:
    """x, or a view of it that DLPack can describe; what is no array is left as it is."""
    # First what costs least: the extension reads PyTorch's tensors (2.10 or later) from C.
    if x is None or hasattr(type(x), "__dlpack_c_exchange_api__") or isinstance(x, Tensor):
        return x
    torch = _torch_of(x)
    if torch is not None:
        if x.requires_grad:
            x = x.detach()
        name = str(x.dtype)[len("torch.") :]
        if name == "float4_e2m1fn_x2":  # a byte with two values, as the library's packed FP4
            return x.view(torch.uint8)
        if name.startswith("float8_") and name in _ML_DTYPES:
            return _viewed(x, x.view(torch.uint8), _ML_DTYPES[name][1])
        return x
    if type(x).__module__ == "numpy" and x.dtype.kind == "V" and x.dtype.name in _ML_DTYPES:
        stored, ours = _ML_DTYPES[x.dtype.name]
        return _viewed(x, x.view(stored), ours)
    return x


def _viewed(x: Any, stored: Any, ours: str) -> Any:
    """The stored values as ours; what cannot be imported is left for the extension to refuse, which
    knows the name of the argument."""
    try:
        return _core.as_tensor(stored, "").view(ours)
    except ValueError:
        return x


def output_like(x: Any, dtype: Optional[str] = None) -> Any:
    """An uninitialised array of the shape, kind and device of x, the argument hidden_states; dtype
    None: that of x."""
    torch = _torch_of(x)
    if torch is not None:
        wanted = None if dtype is None else getattr(torch, _TORCH_NAMES[dtype])
        return torch.empty_like(x, dtype=wanted, memory_format=torch.contiguous_format)
    if type(x).__module__ == "numpy" and (dtype is None or dtype == "f32"):
        import numpy

        return numpy.empty(x.shape, x.dtype if dtype is None else "float32")
    tensor = _core.as_tensor(array(x), "hidden_states")
    return _core.empty(list(tensor.shape), dtype or tensor.dtype, tensor.device)


def returned_to(x: Array, tensor: Array) -> Array:
    """The Tensor, whose memory nobody else has, as an array of x's kind."""
    torch = _torch_of(x)
    if torch is not None:
        return torch.from_dlpack(tensor)
    if type(x).__module__ == "numpy":
        import numpy

        return numpy.from_dlpack(tensor).copy()  # NumPy before 2.1 takes it for read-only
    return tensor


def stream_of(x: Any, stream: Optional[int]) -> Optional[int]:
    """The stream that was given; for PyTorch's tensors its current one, on the CPU its threads."""
    if stream is not None:
        return stream
    torch = _torch_of(x)
    if torch is None:
        return None
    if x.is_cuda:
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # makes no Stream object
        if raw is not None:
            return int(raw(x.get_device()))
        return int(torch.cuda.current_stream(x.device).cuda_stream)
    return _torch_threads()


_forked = False


def _after_fork() -> None:
    """OpenMP's threads are gone in a child process, but OpenMP does not know it."""
    global _forked
    _forked = True
    _torch_threads.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


@functools.lru_cache(maxsize=None)
def _torch_threads() -> Optional[int]:
    """The threads that PyTorch computes with on the CPU, or None where they are not OpenMP's."""
    if _forked:
        return None
    try:
        with open("/proc/self/maps") as maps:
            found = re.search(r"/\S*/torch\S*/lib(gomp|iomp5|omp)\b[^/\s]*\.so\S*", maps.read())
        return _core.openmp_stream(found.group(0)) if found else None
    except (OSError, ValueError):
        return None


def scratch_of(x: Any, stream: Optional[int]) -> Optional[Callable[[int], Any]]:
    """What allocates scratch memory for a call with x; None: the library does.

    PyTorch's allocator serves its CUDA tensors on their current stream: it knows what a CUDA graph
    holds, and who may use memory that another call has just returned.
    """
    torch = _torch_of(x)
    if torch is None or not x.is_cuda or stream is not None:
        return None
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=x.device)


def invalid(argument: str, message: str) -> ValueError:
    """What the extension raises for an argument, of a call that it does not see."""
    error = ValueError(message)
    for name, value in (("argument", argument), ("fault", "value"), ("reason", "supported")):
        setattr(error, name, value)
    return error


def checked(settings: Mapping[str, Any], known: FrozenSet[str], kind: str) -> Dict[str, Any]:
    """The settings that are not None, dtypes and devices by their names. Raises TypeError for a
    setting that is not known."""
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(f"no {kind} {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    return {key: _name(value) for key, value in given(settings).items()}


def _name(value: Any) -> Any:
    """The name of a dtype or device of PyTorch or a dtype of NumPy; all else as it is."""
    kind = type(value)
    numpy = sys.modules.get("numpy")
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        name = str(value).removeprefix("torch.")
    elif numpy and isinstance(value, numpy.dtype):
        name = value.name
    elif numpy and kind is type and issubclass(value, numpy.generic):  # ml_dtypes' as well
        name = numpy.dtype(value).name
    else:
        return value
    return _OUR_NAMES.get(name, name)


# Of the types of rows that travel, where others name them otherwise.
_OUR_NAMES = {"float8_e4m3fn": "e4m3", "int8": "i8"}


def given(settings: Mapping[str, Any]) -> Dict[str, Any]:
    """The settings that are not None."""
    return {key: value for key, value in settings.items() if value is not None}


def as_tensor(x: Array) -> Tensor:
    """`x` as a fusedmoe.Tensor that shares its memory and keeps it alive.

    `Tensor.view(dtype)` names the same bytes by another type, as "e4m3", "e8m0" or "e2m1" for
    uint8; `Tensor.astype(dtype)` converts among f64, f32, f16 and bf16. A Tensor goes back by
    DLPack: `numpy.from_dlpack(tensor)`, `torch.from_dlpack(tensor)`.

    Raises:
        ValueError: for what is no array, or has a type or device that the library lacks.
    """
    return _core.as_tensor(array(x), "x")


def empty(shape: Iterable[int], dtype: str = "bf16", device: str = "cpu") -> Tensor:
    """Uninitialised memory.

    Args:
        shape: at most 6 numbers.
        dtype: "f32", "bf16", "i32", "u8", "e4m3", ...
        device: "cpu" or "cuda:0".

    Raises:
        MemoryError: where there is not so much.
        RuntimeError, NotImplementedError: for a device that cannot be used.
    """
    return _core.empty(list(shape), dtype, device)


def load_file(path: Path) -> Dict[str, Tensor]:
    """The tensors of a safetensors file, read into memory.

    Raises:
        OSError: for a file that cannot be read or is malformed.
    """
    return _core.load_file(os.fspath(path))
