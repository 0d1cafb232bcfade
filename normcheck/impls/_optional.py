"""Shared by adapters of optional packages: whether a package works here, and why a norm does not take a case."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

from normcheck.cases.case import Case
from normcheck.errors import error_text, one_line

_GLANCING = ContextVar("glancing", default=False)


@contextmanager
def glance() -> Iterator[None]:
    """Inside the block no package is imported to see whether it works, which takes seconds; see ``untried``."""
    token = _GLANCING.set(True)
    try:
        yield
    finally:
        _GLANCING.reset(token)


def untried(package: str) -> str | None:
    """Inside ``glance``: why nobody knows whether ``package``, which is installed, works. Otherwise None."""
    return f"{package} is installed; normcheck doctor tries it" if _GLANCING.get() else None


def not_working(module: str, package: str) -> str | None:
    """Why ``module`` cannot be used here, or None. ``package``: its name for the reader.

    An installed package is imported: it may be another one of that name, or built for another torch.
    """
    if find_spec(module.partition(".")[0]) is None:
        return f"{package} is not installed"
    if reason := untried(package):
        return reason
    try:
        importlib.import_module(module)
    except Exception as error:  # a package that does not fit raises anything: a missing symbol, another GPU
        return f"{package} is installed but does not work: {one_line(error_text(error), 240)}"
    return None


def no_bias(case: Case) -> str | None:
    """Why a norm without a bias cannot run ``case``, or None."""
    return "takes no bias" if case.bias else None
