"""Imports that every worker needs, made once by the server from which workers are forked."""

from __future__ import annotations

import atexit
import gc
import os
from contextlib import suppress
from importlib import import_module

from normcheck.errors import NormcheckError
from normcheck.impls.kernels import interpreter
from normcheck.isolation import worker
from normcheck.isolation.sandbox import adopt_orphans

__all__ = ["worker"]

adopt_orphans()
atexit.register(os._exit, 0)  # the server ends when its last client has: without half a second of taking torch apart
if interpreter.enabled():
    with suppress(NormcheckError):  # the worker that needs it says so
        interpreter.enable()
import_module("torch.fx.experimental.symbolic_shapes")  # autograd's first backward imports it, for 0.4 s
gc.freeze()  # no collection in a worker walks through torch's objects, which would copy their pages, too
