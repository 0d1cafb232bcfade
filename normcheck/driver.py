"""The NVIDIA driver, as the kernel's own files tell of it: nothing is imported for that."""

from __future__ import annotations

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
