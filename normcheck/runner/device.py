"""The device that is asked for, and whether it is there."""

from __future__ import annotations

import torch

from normcheck.errors import UsageError, check_names


def device_of(asked: str) -> str:
    """``auto`` -> "cuda" where torch sees a GPU, else "cpu"; anything else as it is."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_for(asked: str) -> str:
    """``cpu`` or ``cuda``; on a CPU, Triton kernels that are loaded from now on run under its interpreter."""
    device = device_there(asked)
    if device == "cpu":
        from normcheck.impls.kernels.interpreter import enable

        enable()
    return device


def device_there(asked: str) -> str:
    """``cpu`` or ``cuda``, if it is there. Raises UsageError."""
    check_names("device", (asked,), ("auto", "cpu", "cuda"))
    device = device_of(asked)
    if device == "cuda" and device_of("auto") != "cuda":
        raise UsageError("device=cuda: expected auto or cpu, torch sees no GPU here")
    return device
