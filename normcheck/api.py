"""The gate from Python: a kernel that is an object here, such as a closure in a test suite, judged in this process."""

from __future__ import annotations

import inspect
import io
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from normcheck.cases.dtypes import DTYPES
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, check_names, one_line, one_of, shown
from normcheck.gate.decision import BROKEN, Terms, concluded
from normcheck.gate.plan import Plan
from normcheck.gate.request import Request, check_timeout, parsed, profile_of
from normcheck.gate.run import judged
from normcheck.gate.sweep import result_of
from normcheck.impls import discovery
from normcheck.impls.adapt import adapt
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels.interpreter import enable, enabled
from normcheck.reports import terminal
from normcheck.result import Run, Verdict
from normcheck.runner.call import poisoned_memory
from normcheck.runner.device import device_there
from normcheck.runner.environment import environment


def verify(
    fn: Callable[..., Any] | Implementation,
    *,
    op: str = "",
    dtypes: str | Sequence[str] = DTYPES,
    profile: str = "quick",
    max_examples: int | None = None,
    time_budget: float | None = None,
    seed: int = 0,
    device: str = "auto",
    timeout: float = 120.0,
    case: str = "",
) -> list[Verdict]:
    """The verdicts of ``fn``, one a dtype, as ``normcheck verify`` reaches them.

    ``fn``: ``f(x, weight, bias, eps) -> y`` (with or without bias; a function, a closure or a torch module) together
    with ``op``, or an ``Implementation``. Shapes and dtypes of its tensors are those of ``Implementation``. The other
    arguments are the options of ``normcheck verify``; with ``case``, a case line, that case alone is run.

    ``fn`` is called in this process, since another could not import a closure: a crash of it is a crash of the test
    suite, and ``timeout`` (seconds a case) interrupts Python code of the main thread only. On a CPU, a Triton kernel
    needs TRITON_INTERPRET=1 in the environment before Triton is imported, as anywhere. The state of torch's threads,
    random numbers, default dtype and grad mode is the same afterwards, whatever ``fn`` did to it.

    Raises UsageError for arguments that make no sense; never for what ``fn`` does, which is a finding.
    """
    return list(_run(fn, op, dtypes, _request(locals()), case).verdicts)


def assert_conforms(
    fn: Callable[..., Any] | Implementation,
    *,
    op: str = "",
    dtypes: str | Sequence[str] = DTYPES,
    profile: str = "quick",
    max_examples: int | None = None,
    time_budget: float | None = None,
    seed: int = 0,
    device: str = "auto",
    timeout: float = 120.0,
    case: str = "",
    allow_thin: bool = False,
) -> None:
    """Raise AssertionError, with what the terminal would show, unless ``fn`` passes; also if nothing was checked.

    Arguments are those of ``verify``; ``allow_thin`` accepts a pass of which not all of the core was run, as with few
    ``max_examples``.
    """
    __tracebackhide__ = True
    run = _run(fn, op, dtypes, _request(locals()), case, allow_thin=allow_thin)
    if run.exit_code:
        stream = io.StringIO()
        terminal.render(run, terminal.console_for(stream, width=100))
        raise AssertionError("\n" + stream.getvalue().rstrip())


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("op", "profile", "device", "case"), (str,)),
    "seed": (int,),
    "timeout": (int, float),
    "max_examples": (int, type(None)),
    "time_budget": (int, float, type(None)),
}


def _request(given: dict[str, Any]) -> Request:
    for name, types in _TYPES.items():
        if not isinstance(given[name], types) or isinstance(given[name], bool):
            expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
            raise UsageError(f"{name}={shown(given[name])}: expected {expected}")
    dtypes = given["dtypes"]
    several = isinstance(dtypes, list | tuple) and dtypes and all(isinstance(dtype, str) for dtype in dtypes)
    if not several and not isinstance(dtypes, str):
        raise UsageError(f"dtypes={shown(dtypes)}: expected {one_of(DTYPES)}, or a list of them")
    names = ("profile", "max_examples", "time_budget", "seed", "device", "timeout")
    return Request(isolation=False, **{name: given[name] for name in names})


def _run(
    fn: Any, op: str, dtypes: str | Sequence[str], request: Request, line: str, *, allow_thin: bool = False
) -> Run:
    begun = time.perf_counter()
    implementation, spec = _implementation(fn, op)
    wanted = (dtypes,) if isinstance(dtypes, str) else tuple(dict.fromkeys(dtypes))
    check_names("dtypes", wanted, DTYPES)
    check_timeout(request.timeout)
    device = device_there(request.device)
    if device == "cpu" and enabled():
        enable()  # with the remedies that the interpreter needs to round as a GPU does
    case = parsed(line) if line else None
    if case is not None and case.op != implementation.op:
        raise UsageError(f"case={one_line(line, 120)}: expected a case of {implementation.op}")
    op_ = discovery.ops()[implementation.op]
    cells = tuple(Cell(op_, implementation, dtype, spec) for dtype in ((case.dtype,) if case else wanted))
    plan = Plan(cells, profile_of(request), request.seed, device, request.timeout)
    with _left_as_it_was(device):
        if case is not None:
            verdicts: tuple[Verdict, ...] = (result_of(cells[0], case, plan),)
        else:
            verdicts = tuple(judged(cell, plan, lambda cases, worst: None) for cell in cells)
    verdicts = tuple(_told(verdict, spec) for verdict in verdicts)
    run = Run(
        argv=(),
        seed=request.seed,
        profile=request.profile,
        seconds=time.perf_counter() - begun,
        environment=environment(device),
        verdicts=verdicts,
        status="",
        exit_code=BROKEN,
    )
    return concluded(run, Terms(required=(implementation.name,), allow_thin=allow_thin))


def _told(verdict: Verdict, spec: str) -> Verdict:
    """``verdict`` with a line to paste: a command only where a command can import the function."""
    if verdict.failure is None or spec:
        return verdict
    line = f"normcheck.verify(fn, op={verdict.op!r}, case={verdict.failure.case!r})"
    return replace(verdict, failure=replace(verdict.failure, reproduce=line))


def _implementation(fn: Any, op: str) -> tuple[Implementation, str]:
    """``fn`` as an implementation, and how the command line names it, or ""."""
    if isinstance(fn, Implementation):
        implementation = discovery.validated(fn, "fn")
        if op not in ("", implementation.op):
            raise UsageError(f"op={op}: expected {implementation.op}, which the implementation declares")
        return implementation, ""
    if not callable(fn):
        raise UsageError(f"fn={shown(fn)}: expected a function f(x, weight, bias, eps) -> y, or an Implementation")
    if op not in discovery.ops():
        raise UsageError(f"op={one_line(op, 60)}: expected {one_of(discovery.ops())}, what the function computes")
    if isinstance(fn, torch.nn.Module) and len(inspect.signature(fn.forward).parameters) < 3:
        raise UsageError(
            f"fn={type(fn).__name__}: expected a module whose forward takes (x, weight, bias, eps); one with a weight "
            "of its own: lambda x, w, b, eps: torch.func.functional_call(module, {'weight': w}, (x,))"
        )
    forward, takes_bias = adapt(fn)
    name = one_line(getattr(fn, "__name__", type(fn).__name__), 120)
    return discovery.wrapped(forward, takes_bias, op, name, _source(fn)), _spec(fn)


def _source(fn: Any) -> str:
    """File and line of a function, or ""."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def _spec(fn: Any) -> str:
    """FILE.py:NAME of a function that a new process finds there; "" for a closure, a lambda or an object."""
    code, name = getattr(fn, "__code__", None), getattr(fn, "__qualname__", "")
    if code is None or not name.isidentifier() or not Path(code.co_filename).is_file():
        return ""
    return f"{os.path.relpath(code.co_filename)}:{name}" if code.co_filename.endswith(".py") else ""


@contextmanager
def _left_as_it_was(device: str) -> Iterator[None]:
    """Run normcheck under torch's own defaults, and give the caller back the state that it had."""
    threads, dtype, numbers = torch.get_num_threads(), torch.get_default_dtype(), random.getstate()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if started or device == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad(), poisoned_memory():
            torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        random.setstate(numbers)
