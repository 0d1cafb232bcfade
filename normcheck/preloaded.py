"""Imported once by the server that workers are forked from, so that none of them has to: what every worker needs."""

from __future__ import annotations

from contextlib import suppress

from normcheck import worker
from normcheck.errors import NormcheckError
from normcheck.kernels import interpreter

__all__ = ["worker"]

if interpreter.enabled():
    with suppress(NormcheckError):  # the worker that needs it says so
        interpreter.enable()
