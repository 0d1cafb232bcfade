"""The machine and the versions of the libraries, as every report has them."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import cache

import torch

from normcheck import __version__
from normcheck.runner import nvidia_driver


def environment(device: str) -> dict[str, str]:
    """Name -> version or description; a library that is not installed is left out."""
    described = {
        "normcheck": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "cudnn_frontend": _version("nvidia-cudnn-frontend"),
        "hypothesis": _version("hypothesis"),
        "platform": platform.platform(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        described["device"] = properties.name
        described["compute_capability"] = f"{properties.major}.{properties.minor}"
        described["cuda"] = str(torch.version.cuda)
        described["cudnn_backend"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        described["driver"] = nvidia_driver.version()
    else:
        described["device"] = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {name: value for name, value in described.items() if value}


@cache
def machine(device: str) -> dict[str, str]:
    """Which machine this is: its ``host``; for ``cuda`` also the ``gpu``'s model, its ``uuid`` and the ``driver``."""
    found = {"host": platform.node()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": properties.name,
            "uuid": str(getattr(properties, "uuid", "")),
            "driver": nvidia_driver.version(),
        }
    return {name: value for name, value in found.items() if value}


def memory_bytes(device: str) -> int:
    """Bytes of the machine's memory; for ``cuda``, the bytes of the GPU's memory that this process can still use."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        torchs = torch.cuda.memory_stats_as_nested_dict()  # memory_reserved() would flatten all of it, each time
        reserved, used = (torchs[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
        share = total * torch.cuda.get_per_process_memory_fraction()
        return max(0, int(min(free + reserved, share) - used))
    return _machine_bytes()


@cache
def _machine_bytes() -> int:
    import psutil  # not at the top: another environment, which tells its versions, may not have it

    return psutil.virtual_memory().total


@cache
def _version(distribution: str) -> str:
    try:
        return str(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return ""
