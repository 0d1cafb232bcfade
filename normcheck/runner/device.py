"""The device of a run: what ``--device`` means on this machine."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from normcheck.errors import UsageError


def device_of(name: str) -> str:
    """``auto`` -> "cuda" if torch sees a GPU, else "cpu"; any other name as it is."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_for(name: str, *, apart: bool = False) -> str:
    """As ``device_there``; for ``cpu``, Triton kernels that are loaded from now on run under its interpreter.

    Another environment, in which a kernel's process may run, need not have Triton. ``apart``: all kernels run in other
    processes, so that this one, which they inherit it from, need not import Triton.
    """
    device = device_there(name)
    if device == "cpu" and find_spec("triton") is not None:
        if apart:
            os.environ["TRITON_INTERPRET"] = "1"
            return device
        from normcheck.impls.kernels.interpreter import enable

        enable()
    return device


def device_there(name: str) -> str:
    """``cpu`` or ``cuda``. Raises UsageError for ``cuda`` if torch sees no GPU."""
    device = device_of(name)
    if device == "cuda" and device_of("auto") != "cuda":
        raise UsageError("device=cuda: expected auto or cpu, torch sees no GPU here")
    return device
