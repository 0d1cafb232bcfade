"""What adapters of optional packages have in common: whether a package is there, and what most norms do not take."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

from normcheck.cases.case import Case

_GLANCING = ContextVar("glancing", default=False)


@contextmanager
def glance() -> Iterator[None]:
    """Within it no package is imported to see whether it works, which takes seconds; a reason says so instead."""
    token = _GLANCING.set(True)
    try:
        yield
    finally:
        _GLANCING.reset(token)


def untried(package: str) -> str | None:
    """Why it is not known whether ``package``, which is installed, works: there is only time for a glance; or None."""
    return f"{package} is installed; normcheck doctor tries it" if _GLANCING.get() else None


def missing(module: str, package: str, device: str) -> str | None:
    """Why ``module`` cannot run on ``device``, or None; ``package``: what its people call it.

    A package that is there is imported: it may be another of that name, or built for another torch.
    """
    if device != "cuda":
        return f"{package} needs an NVIDIA GPU"
    if find_spec(module.partition(".")[0]) is None:
        return f"{package} is not installed"
    if reason := untried(package):
        return reason
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package does where it does not fit: a missing symbol, another GPU
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return f"{package} is installed but does not work: {what}"
    return None


def no_bias(case: Case) -> str | None:
    """Why a norm that takes no bias cannot run ``case``, or None."""
    return "takes no bias" if case.bias else None


def one_dtype(case: Case) -> str | None:
    """Why a norm whose weight has the dtype of x cannot run ``case``, or None."""
    return "takes no weight in fp32 beside x in half precision" if case.weight_dtype == "fp32" else None
