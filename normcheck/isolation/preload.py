"""Imports that every worker needs, made once by the root, the process that servers are forked from."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from normcheck.errors import NormcheckError
from normcheck.impls.kernels import interpreter
from normcheck.isolation import worker

__all__ = ["worker"]

if interpreter.enabled():
    with suppress(NormcheckError, ImportError):  # the worker that needs it says so
        interpreter.enable()
import_module("torch.fx.experimental.symbolic_shapes")  # autograd's first backward imports it, for 0.4 s
gc.freeze()  # no collection in a worker walks through torch's objects, which would copy their pages, too
