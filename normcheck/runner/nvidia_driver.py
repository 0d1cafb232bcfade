"""The NVIDIA driver and its GPUs, read from /proc and libcuda without importing torch."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc/driver/nvidia")
"""The files in which the driver describes itself and its GPUs."""

CONTROL = Path("/dev/nvidiactl")
"""The device that a process opens to use any GPU; a container may have it without PROC."""


def present() -> bool:
    """Whether the driver's control device exists."""
    return CONTROL.exists()


def version() -> str:
    """The driver's version; "" if its file cannot be read."""
    try:
        with open(PROC / "version", encoding="ascii", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit()), "")


def gpus() -> tuple[str, ...]:
    """The model of each GPU of the machine; this process may see fewer of them."""
    models: list[str] = []
    for file in sorted(PROC.glob("gpus/*/information")):
        try:
            lines = file.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return tuple(models)


_YIELD = 2  # CU_CTX_SCHED_YIELD


def wait_yielding() -> None:
    """Have this process give way to others while it waits for its GPU, the one that torch calls 0. It may not have
    used it yet.

    By default it asks again and again, which takes a core from others that wait for theirs. To sleep would free the
    core, but to be woken takes a virtual machine half a millisecond: a cell reached 9 to 20 shapes asleep, 31 to 76
    awake.
    """
    device = ctypes.c_int()
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libcuda.so.1")
        if not (library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), 0)):
            library.cuDevicePrimaryCtxSetFlags(device, _YIELD)


def devices(toolkit: int) -> int:
    """How many GPUs this process can use with a program built for CUDA ``toolkit``, a major version.

    CUDA_VISIBLE_DEVICES counts. The call initialises CUDA, so a process that forks later must not make it.
    """
    version, count = ctypes.c_int(), ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        failed = (
            library.cuInit(0)
            or library.cuDriverGetVersion(ctypes.byref(version))
            or library.cuDeviceGetCount(ctypes.byref(count))
        )
    except (OSError, AttributeError):  # no driver, or another library of that name
        return 0
    return 0 if failed or version.value // 1000 < toolkit else count.value
