"""Python interface of the gate: a kernel that is a Python object, such as a closure, is checked in this process."""

from __future__ import annotations

import inspect
import io
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from normcheck.cases.case_line import parsed
from normcheck.cases.dtypes import DTYPES, named
from normcheck.cases.ops import OPS, with_residual
from normcheck.checks.cell import Cell
from normcheck.checks.contexts import UNTRIED
from normcheck.contexts.later import note_state
from normcheck.errors import UsageError, check_names, one_line, one_of, shown
from normcheck.gate.decision import Terms, concluded
from normcheck.gate.engine import verdict_of
from normcheck.gate.options import ALL_CONFIGURATIONS, PROMISING, VerifyOptions
from normcheck.gate.plan import Plan, asked_for, configs_of, contexts_of, profile_of
from normcheck.gate.prepare import prepared
from normcheck.gate.run import run_of
from normcheck.gate.sweep import result_of
from normcheck.impls import discovery
from normcheck.impls.adapt import adapt, require_named
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels.interpreter import enable, enabled
from normcheck.options import built
from normcheck.reports import terminal
from normcheck.result import CONTEXT, SweepResult, Verdict
from normcheck.runner.call import poisoned_memory
from normcheck.runner.device import device_there
from normcheck.runner.environment import environment


class Options(TypedDict, total=False):
    """The options of ``normcheck verify`` that ``verify`` takes as well; see ``normcheck.gate.options``."""

    profile: str
    max_examples: int | None
    time_budget: float | None
    seed: int
    device: str
    timeout: float
    layout: tuple[str, ...]
    context: tuple[str, ...]
    contexts: bool
    require_context: tuple[str, ...]
    configs: str


def verify(
    fn: Callable[..., Any] | Implementation,
    *,
    op: str = "",
    dtypes: str | Sequence[str] = DTYPES,
    case: str = "",
    **options: Unpack[Options],
) -> list[Verdict]:
    """The verdicts of ``fn``, one for each dtype, which ``normcheck verify`` would reach as well.

    ``fn``: ``f(x, weight, bias, eps) -> y`` (with or without bias; a function, a closure or a torch module) together
    with ``op``, or an ``Implementation``. Shapes and dtypes of its tensors are those of ``Implementation``. The other
    arguments are the options of ``normcheck verify``, with the same defaults: ``profile``, ``max_examples``,
    ``time_budget``, ``seed``, ``device``, ``timeout``, ``layout``, ``context``, ``contexts``,
    ``require_context``, ``configs``. With ``case``, a case line, that case alone is run, in no context that is not
    asked for, and with the configuration ``[KERNEL:]NUMBER`` of its autotuners that ``configs`` names, if it does.

    ``fn`` is called in this process, since another could not import a closure. So its crash ends the test suite, and
    ``timeout`` (seconds per case) interrupts only Python code of the main thread. On a CPU, a Triton kernel needs
    TRITON_INTERPRET=1 in the environment before Triton is imported, as anywhere. Afterwards torch's threads, random
    numbers, default dtype and grad mode are as before, even if ``fn`` changed them.

    Raises UsageError for wrong arguments. Nothing that ``fn`` does makes it raise: an exception of ``fn`` is a finding.
    """
    return list(_run(fn, op, case, _options(dtypes, options)).verdicts)


def assert_conforms(
    fn: Callable[..., Any] | Implementation,
    *,
    op: str = "",
    dtypes: str | Sequence[str] = DTYPES,
    case: str = "",
    allow_thin: bool = False,
    **options: Unpack[Options],
) -> None:
    """Raise AssertionError unless ``fn`` was checked and passes. Its message is the terminal report, the last line of
    it first, since a summary of tests shows only the first line of a message.

    Arguments are those of ``verify``. ``allow_thin`` accepts a pass without all of the core, as with few
    ``max_examples``. Raises UsageError for wrong arguments.
    """
    __tracebackhide__ = True
    run = _run(fn, op, case, _options(dtypes, options, allow_thin=allow_thin))
    if run.exit_code:
        raise AssertionError(told(run))


def told(run: SweepResult) -> str:
    """The terminal report of ``run``, its last line first."""
    stream = io.StringIO()
    terminal.render(run, terminal.console_for(stream, width=100))
    report, _, outcome = stream.getvalue().strip("\n").rpartition("\n")
    return f"{outcome}\n\n{report.rstrip()}"


def run_of_cell(
    kernel: Callable[..., Any] | Implementation | str,
    *,
    op: str = "",
    dtype: str = "fp16",
    name: str = "",
    allow_thin: bool = False,
    **options: Unpack[Options],
) -> SweepResult:
    """The run of one cell, as ``told`` tells it; see ``verify`` for the arguments.

    ``kernel``: also what ``--impl`` takes, such as ``FILE.py:NAME``. That is imported and called in processes of its
    own, as by ``normcheck verify``, so that its crash is a finding. Raises UsageError, also if it cannot be imported.
    """
    checked = _options(dtype, options, allow_thin=allow_thin)
    if not isinstance(kernel, str):
        return _run(kernel, op, "", checked)
    begun = time.perf_counter()
    checked = replace(checked, isolation=True, impl=(kernel,), op=(op,) if op else ())
    plan = prepared(checked)
    cells = tuple(cell for cell in plan.cells if name in ("", cell.implementation.name))
    plan = replace(plan, cells=cells, in_python=True)
    with _left_as_it_was(plan.device):
        verdicts = tuple(verdict_of(cell, plan, lambda cases, worst: None) for cell in plan.cells)
    run = run_of(checked, plan, verdicts, begun, environment(plan.device))
    names = tuple(dict.fromkeys(cell.implementation.name for cell in plan.cells))
    return concluded(run, Terms(required=names, allow_thin=allow_thin))


def _options(dtypes: str | Sequence[str], given: Mapping[str, Any], **own: bool) -> VerifyOptions:
    """Checked options. ``own``: those of one function that the other does not take."""
    names = ("op", "dtypes", "case", *own, *Options.__annotations__)
    for name in given.keys() - set(names):
        meant = [f"did you mean {near}? " for near in get_close_matches(name, names, 1)]
        raise TypeError(f"{name}: {''.join(meant)}expected {one_of(names)}")
    several = isinstance(dtypes, list | tuple) and dtypes and all(isinstance(dtype, str) for dtype in dtypes)
    if not several and not isinstance(dtypes, str):
        raise UsageError(f"dtypes={shown(dtypes)}: expected {one_of(DTYPES)}, or a list of them")
    if given.get("profile") == "soak":
        raise UsageError(f"profile=soak: expected {one_of(PROMISING)}; it ends by Ctrl-C, and no test suite does")
    wanted = tuple(dict.fromkeys(map(named, (dtypes,) if isinstance(dtypes, str) else dtypes)))
    check_names("dtypes", wanted, DTYPES)
    return built(VerifyOptions, {**given, **own, "dtype": wanted, "isolation": False})


def _run(fn: Any, op: str, line: str, options: VerifyOptions) -> SweepResult:
    begun = time.perf_counter()
    for name, value in (("op", op), ("case", line)):
        if not isinstance(value, str):
            raise UsageError(f"{name}={shown(value)}: expected a string")
    implementation, spec = _implementation(fn, op)
    device = device_there(options.device)
    if device == "cpu" and enabled():
        enable()  # also patches the interpreter to round as a GPU does
    case = parsed(line) if line else None
    if case is not None and case.op != implementation.op:
        raise UsageError(f"case={one_line(line, 120)}: expected a case of {implementation.op}")
    implementation = asked_for((case.layout,) if case else options.layout, spec, implementation)
    op_, dtypes = OPS[implementation.op], (case.dtype,) if case else options.dtype
    one = options.configs if case and options.configs not in ALL_CONFIGURATIONS else ""
    cells = tuple(Cell(op_, implementation, dtype, spec, options.layout, configuration=one) for dtype in dtypes)
    plan = Plan(
        cells,
        profile_of(options),
        options.seed,
        device,
        options.timeout,
        in_python=True,
        contexts=contexts_of(options, device),
        within=tuple(dict.fromkeys((*options.context, *options.require_context))) if case else (),
        asked=bool(options.context),
        held_to=options.require_context,
        configs="won" if case else configs_of(options),
    )
    with _left_as_it_was(device):
        if case is not None:
            verdicts: tuple[Verdict, ...] = (result_of(cells[0], case, plan),)
        else:
            verdicts = tuple(verdict_of(cell, plan, lambda cases, worst: None) for cell in cells)
    verdicts = tuple(_with_line_to_paste(verdict, spec) for verdict in verdicts)
    run = run_of(options, plan, verdicts, begun, environment(device))
    return concluded(run, Terms(required=(implementation.name,), allow_thin=options.allow_thin))


def _with_line_to_paste(verdict: Verdict, spec: str) -> Verdict:
    """``verdict``; if no command can import the function (no ``spec``), its line to paste is a call of ``verify``."""
    if verdict.failure is None or spec:
        return verdict
    found = verdict.failure
    option = "require_context" if found.message.startswith(UNTRIED) else "context"
    context = f", {option}=({found.check!r},)" if found.kind == CONTEXT else ""
    which = found.configuration.partition(" ")[0]
    config = f", configs={which!r}" * bool(which)
    line = f"normcheck.verify(fn, op={verdict.op!r}, case={found.case!r}{context}{config})"
    return replace(verdict, failure=replace(found, reproduce=line, explain=""))


def _implementation(fn: Any, op: str) -> tuple[Implementation, str]:
    """``fn`` as an implementation, and its name for the command line, or ""."""
    if isinstance(fn, Implementation):
        implementation = discovery.validated(fn, "fn")
        if op not in ("", implementation.op):
            raise UsageError(f"op={op}: expected {implementation.op}, which the implementation declares")
        if implementation.environment or implementation.variants:
            expected = "expected neither in this process; normcheck verify --impl FILE.py starts one for each"
            raise UsageError(f"environment, variants of {shown(implementation.name)}: {expected}")
        return implementation, ""
    if not callable(fn):
        raise UsageError(f"fn={shown(fn)}: expected a function f(x, weight, bias, eps) -> y, or an Implementation")
    if op not in OPS:
        raise UsageError(f"op={one_line(op, 60)}: expected {one_of(OPS)}, what the function computes")
    if isinstance(fn, torch.nn.Module) and len(inspect.signature(fn.forward).parameters) < 3:
        raise UsageError(
            f"fn={type(fn).__name__}: expected a module whose forward takes (x, weight, bias, eps); one with a weight "
            "of its own: lambda x, w, b, eps: torch.func.functional_call(module, {'weight': w}, (x,))"
        )
    name = one_line(getattr(fn, "__name__", type(fn).__name__), 120)
    adapted = adapt(fn, name, OPS[op])
    op = with_residual(op, adapted.named)
    require_named(adapted, fn, OPS[op], name)
    return discovery.wrapped(adapted, op, name, _source(fn)), _spec(fn)


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
    """Within it, torch has its own defaults; afterwards the caller's state is as it was."""
    threads, dtype, numbers = torch.get_num_threads(), torch.get_default_dtype(), random.getstate()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if started or device == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad(), poisoned_memory():
            torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
            torch.set_default_dtype(torch.float32)
            note_state()
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        random.setstate(numbers)
