"""Whose fault it is that a GPU's memory ran out: the kernel's, if most of the memory was left to it, or others'."""

from __future__ import annotations

import re

import torch

from normcheck.cases.case import Case
from normcheck.errors import Broken

IN_USE = "the GPU's memory is in use"

_SHARE = 0.5
"""A kernel that runs out of memory needs too much if it had this share of the GPU's. Others' processes, their cases
and what their allocators keep take the rest: with sixteen kernels beside each other one of three was out of memory."""

_PLENTY_FOR_ELEMENT = 64
"""Bytes for each element of a case, 16 tensors in fp32, without which nothing is said of any kernel."""

_BYTES = r"(?P<number>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)"
_FREE, _OWN = re.compile(f"of which {_BYTES} is free"), re.compile(f"this process has {_BYTES} memory in use")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def others_have_it(broken: Broken, case: Case, device: str) -> str:
    """Why running out of GPU memory says nothing about the kernel, as others use it; "" if it does, or did not run out.

    torch's own message says what was free then, and what the kernel's process had. Another, such as the driver's, does
    not: there what is free now counts.
    """
    if device != "cuda" or "out of memory" not in broken.message:
        return ""
    free, total = torch.cuda.mem_get_info()
    free = min(free, _left_to_it(broken.message, free))
    plenty = max(int(total * _SHARE), _PLENTY_FOR_ELEMENT * case.M * case.N)
    return f"{IN_USE}: {free / 2**30:.1f} GiB are free" if free < plenty else ""


def is_short(reason: str) -> bool:
    """Whether a case was refused for this ``reason`` as the GPU's memory is in use: no fault of the kernel."""
    return IN_USE in reason or "of the GPU's memory" in reason


def _left_to_it(message: str, unknown: int) -> int:
    """Bytes that others left to the kernel's process when torch raised ``message``: free ones, and its own."""
    found = [pattern.search(message) for pattern in (_FREE, _OWN)]
    if None in found:
        return unknown
    return sum(int(float(said["number"]) * _UNITS[said["unit"]]) for said in found if said is not None)
