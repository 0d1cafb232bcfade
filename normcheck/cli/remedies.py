"""Remedies: what to do about each reason why an implementation cannot run."""

from __future__ import annotations

from normcheck.errors import to_install

_STEPS = (
    ("TRITON_INTERPRET", "unset TRITON_INTERPRET on a machine with a GPU; set it to 1 on one without"),
    ("C++ compiler", "install g++, or set CXX"),
    ("triton is not installed", "pip install triton"),
    ("triton on a GPU, which is not installed", "pip install triton"),
    ("nvidia-cudnn-frontend is not installed", to_install("cudnn")),
    ("liger-kernel is not installed", to_install("liger")),
    ("is not installed", "install it: {source}"),
    ("does not work", "install it again, for the torch and the GPU that are here: {source}"),
    ("or newer", "pip install a newer nvidia-cudnn, of the CUDA that torch is built for"),
    ("GPU", "run it on a machine with an NVIDIA GPU, with a torch built for CUDA"),
)


def step_for(reason: str, source: str) -> str:
    """What to do about ``reason``, why an implementation cannot run; ``source``: its ``Implementation.source``."""
    step = next((step for words, step in _STEPS if words in reason), "see {source}")
    return step.replace("{source}", source)
