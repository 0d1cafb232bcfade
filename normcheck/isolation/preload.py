"""Imports that every worker needs, made once by the root, the process that servers are forked from."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial
from importlib import import_module

from normcheck.cases.declared import rules
from normcheck.errors import NormcheckError
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels import interpreter
from normcheck.isolation import worker
from normcheck.isolation.intact import Noted

if interpreter.enabled():
    with suppress(NormcheckError, ImportError):  # the worker that needs it says so
        interpreter.enable()
import_module("torch.fx.experimental.symbolic_shapes")  # autograd's first backward imports it, for 0.4 s
discovery.implementations()  # each worker asks for a name among them, if only to see that there is none
rules(Implementation)
serve = partial(worker.serve, noted=Noted())
gc.freeze()  # no collection in a worker walks through torch's objects, which would copy their pages, too
