"""The NVIDIA driver, as the kernel's own files and its library tell of it: torch is not imported for that."""

from __future__ import annotations

import ctypes
from pathlib import Path

PROC = Path("/proc/driver/nvidia")
"""Where the driver describes itself and its GPUs."""

CONTROL = Path("/dev/nvidiactl")
"""What a process opens to use any of them; in a container it may be there while PROC is not."""


def present() -> bool:
    """Whether there is a driver that this process may open."""
    return CONTROL.exists()


def version() -> str:
    """The driver's version; "" where its file is not there."""
    try:
        with open(PROC / "version", encoding="ascii", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit()), "")


def gpus() -> tuple[str, ...]:
    """The models of the GPUs of the machine, of which this process may see fewer."""
    found = []
    for file in sorted(PROC.glob("gpus/*/information")):
        try:
            lines = file.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return tuple(found)


def devices(toolkit: int) -> int:
    """How many GPUs a program built for CUDA ``toolkit``, a major version, can use here, CUDA_VISIBLE_DEVICES included.

    It initialises CUDA: not for a process that forks afterwards.
    """
    version, count = ctypes.c_int(), ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        failed = (
            library.cuInit(0)
            or library.cuDriverGetVersion(ctypes.byref(version))
            or library.cuDeviceGetCount(ctypes.byref(count))
        )
    except (OSError, AttributeError):  # no driver, or something else of that name
        return 0
    return 0 if failed or version.value // 1000 < toolkit else count.value
