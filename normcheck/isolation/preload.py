"""Imports that every worker needs, made once by the server from which workers are forked."""

from __future__ import annotations

from contextlib import suppress

from normcheck.errors import NormcheckError
from normcheck.impls.kernels import interpreter
from normcheck.isolation import worker
from normcheck.isolation.sandbox import adopt_orphans

__all__ = ["worker"]

adopt_orphans()
if interpreter.enabled():
    with suppress(NormcheckError):  # the worker that needs it says so
        interpreter.enable()
