"""The machine and the versions, as they are written into every report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

import torch

from normcheck import __version__
from normcheck.runner import nvidia_driver


def environment(device: str) -> dict[str, str]:
    """Name -> version or description; what is not there is left out."""
    found = {
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
        found["device"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = str(torch.version.cuda)
        found["cudnn_backend"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["driver"] = nvidia_driver.version()
    else:
        found["device"] = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {name: value for name, value in found.items() if value}


def memory(device: str) -> int:
    """Bytes of memory of the machine, or what is left of its GPU's for this process."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(min(free + torch.cuda.memory_reserved(), total * torch.cuda.get_per_process_memory_fraction()))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(distribution: str) -> str:
    try:
        return str(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return ""
