"""The machine that the library runs on."""

from __future__ import annotations

from . import _core


def cpu_isa() -> str:
    """Instruction set of the CPU kernels: "avx512_bf16", "neon", ...

    Raises:
        ValueError: where the variable FUSEDMOE_CPU_ISA names none.
    """
    return _core.cpu_isa()


def num_threads() -> int:
    """Threads of CPU work."""
    return _core.num_threads()


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of CPU work.

    Args:
        num_threads: 0 restores the default, OMP_NUM_THREADS or the cores that there are.

    Raises:
        ValueError: below 0 or above 4096.
    """
    _core.set_num_threads(num_threads)


def cuda_device_count() -> int:
    """CUDA devices that there are."""
    return _core.cuda_device_count()


def device_problem(device: str) -> str:
    """Why a device cannot be used, in words; empty if it can.

    Args:
        device: "cpu" or "cuda:0".

    Raises:
        ValueError: for another text.
    """
    return _core.device_problem(device)


def log(level: int, message: str) -> None:
    """Hands a message of the library to the logger "fusedmoe". Without handlers nobody hears it."""
    import logging

    logger = logging.getLogger("fusedmoe")
    if logger.hasHandlers():
        logger.log(level, message)
