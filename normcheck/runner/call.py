"""Calling an implementation, and nothing else: here, or in the process where its code is.

It knows no reference and no bound. Whatever goes wrong inside comes out as ``Broken``.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.cases.ops.op import GRADIENTS
from normcheck.errors import Broken, UnsupportedCase, UsageError, one_line, shown, told
from normcheck.impls import adapt, source_location
from normcheck.impls.implementation import Implementation
from normcheck.isolation.proxies import Entry
from normcheck.isolation.remote_run import Link, RemoteRun
from normcheck.isolation.replies import Returned
from normcheck.runner import graph, overwriting
from normcheck.runner.arena import Arena, Surroundings
from normcheck.runner.time_limit import TimeIsUp

LONGEST_REASON = 500
"""Characters of a reason why something cannot run."""

_SNAPSHOT = 1 << 26  # bytes up to which a result is looked at twice
_OWN_FILES = (__file__, adapt.__file__, inspect.getfile(Arena), guard_bands.__file__, overwriting.__file__)
_FRAMES = 6  # how many of the innermost frames of a traceback a report shows


class Unwatched(nullcontext[None]):
    """Where code is called whose memory nobody watches, as while it is timed. ``beside``: as of ``arena.Arena``."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: Mapping[str, object] | None = None


Surrounded = Arena | Unwatched | RemoteRun
"""What is active while code under test runs: an arena in this process, or a run of the process where the code is."""


def surrounded(implementation: Implementation, surroundings: Surroundings) -> Arena | RemoteRun:
    """What the calls of one run are made in."""
    link = link_of(implementation)
    return Arena(surroundings) if link is None else link.run(surroundings)


def link_of(implementation: Implementation) -> Link | None:
    """The way to the process where the implementation's code is; None where it is in this one."""
    entry = implementation.forward
    return entry.link if isinstance(entry, Entry) else None


def begin(
    implementation: Implementation, case: Case, inputs: Inputs, arena: Surrounded, *, deferred: bool = False
) -> None:
    """Let another process begin with the forward that will then be called with the same arguments."""
    if isinstance(arena, RemoteRun):
        arena.begin(case, inputs, graph=implementation.backward is None, deferred=deferred)


def begin_backward(case: Case, inputs: Inputs, saved: Mapping[str, Tensor], arena: Surrounded) -> None:
    """Let another process begin with the backward that will then be called with the same arguments."""
    if isinstance(arena, RemoteRun):
        arena.begin_backward(case, inputs, saved)


def forward(
    implementation: Implementation, case: Case, inputs: Inputs, arena: Surrounded, *, deferred: bool = False
) -> dict[str, Tensor]:
    """Call forward; the tensors that it returned, by name. ``y`` is always there. ``arena`` is active meanwhile.

    ``deferred``: gradients by autograd are asked for only after other calls. Numbers and text that the first forward of
    a run returned beside its tensors are kept with ``arena``, for the backward. What the implementation may overwrite
    is put back, but for autograd: the graph behind y may need what was written.

    Raises Broken if it raises or returns anything but y or a dict with y, UnsupportedCase if its library refuses.
    """
    if isinstance(arena, RemoteRun):
        return arena.forward(case, inputs, graph=implementation.backward is None, deferred=deferred)
    lent = () if implementation.backward is None else {"x"} & {*implementation.overwrites}  # it does not get dy
    with guarded("forward", implementation), overwriting.put_back(lent, inputs):
        with arena:
            returned = implementation.forward(
                inputs.x, inputs.weight, inputs.bias, eps=case.eps, **dict(case.option_values)
            )
            named = _settled(lambda: _named(returned, "forward", "y"), inputs.x)
        if arena.beside is None:
            arena.beside = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
        return overwriting.apart(_tensors(named), inputs)


def backward(
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    saved: Mapping[str, Tensor],
    arena: Surrounded,
) -> dict[str, Tensor]:
    """Call the implementation's own backward with ``saved``; the gradients that it returned, by name.

    What the implementation may overwrite is put back.
    """
    if isinstance(arena, RemoteRun):
        return arena.backward(case, inputs, saved)
    assert implementation.backward is not None
    with guarded("backward", implementation), overwriting.put_back(implementation.overwrites, inputs):
        with arena:
            returned = implementation.backward(
                inputs.dy,
                inputs.x,
                inputs.weight,
                inputs.bias,
                {**(arena.beside or {}), **saved},
                eps=case.eps,
                **dict(case.option_values),
            )
            named = _settled(lambda: _named(returned, "backward", "dx"), inputs.x)
        return overwriting.apart(_tensors(named), inputs)


def supports(implementation: Implementation, case: Case) -> str | None:
    """What the implementation's own supports() says of a case: None, or why it cannot run."""
    if implementation.supports is None:
        return None
    try:
        with guarded("supports(case)", implementation):
            reason = implementation.supports(case)
            return None if reason is None else one_line(str(reason), LONGEST_REASON)
    except UnsupportedCase as refused:
        return refusal(refused)


def refusal(refused: UnsupportedCase) -> str:
    """The reason that an implementation's library gave, as one line that is not too long."""
    return one_line(told(refused).partition(": ")[2], LONGEST_REASON) or "its library gave no reason"


def unavailable(implementation: Implementation, device: str) -> str:
    """Why nothing of this implementation can run on ``device``, or "". Raises UsageError where that cannot be told."""
    if implementation.unavailable is None:
        return ""
    who = f"unavailable(device) of {shown(implementation.name)}"
    try:
        with guarded(who):
            reason = implementation.unavailable(device)
    except (Broken, UnsupportedCase) as error:
        raise UsageError(str(error)) from error
    if reason is None:
        return ""
    if not isinstance(reason, str):
        raise UsageError(f"{who} returned {shown(reason)}: expected None or why it cannot run")
    return one_line(reason, LONGEST_REASON)


def model(implementation: Implementation, case: Case) -> Mapping[str, Any]:
    """What the implementation declares about its arithmetic, for a case where it depends on it."""
    if not callable(implementation.model):
        return implementation.model
    with guarded("model(case)", implementation):
        return dict(implementation.model(case))


def differentiable(inputs: Inputs) -> Inputs:
    """The same tensors as autograd leaves, for an implementation without a backward of its own."""
    leaves = (t if t is None else t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias))
    x, weight, bias = leaves
    assert x is not None and weight is not None
    return Inputs(x, weight, bias, inputs.dy)


def joined(outputs: Mapping[str, Tensor], inputs: Inputs) -> int:
    """How many gradients of x autograd adds up in its dtype, see ``graph.joined``; ``inputs`` as forward got them."""
    return outputs.joined if isinstance(outputs, Returned) else graph.joined(outputs["y"], inputs.x)


def autograd(outputs: Mapping[str, Tensor], inputs: Inputs, arena: Surrounded) -> dict[str, Tensor]:
    """Gradients by torch autograd through y; empty where y does not depend on the inputs by autograd.

    Where y is wider than dy, autograd itself casts dy to the dtype of y.
    """
    if isinstance(arena, RemoteRun):
        return arena.gradients(outputs, inputs)
    y = outputs["y"]
    if not y.requires_grad:
        return {}
    leaves = [t for t in (inputs.x, inputs.weight, inputs.bias) if t is not None]
    with guarded("backward, by torch autograd through y,"), arena:
        gradients = torch.autograd.grad(y, leaves, inputs.dy, allow_unused=True)
        _synchronise(inputs.x)
    named = {name: g for name, g in zip(GRADIENTS, gradients, strict=False) if g is not None}
    return overwriting.apart(named, inputs)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, torch.empty and its like hand out NaN (integers: all ones), so that what is not written shows.

    What torch.use_deterministic_algorithms(True, warn_only=True) does, without its import of the whole of inductor
    (1.3 s).
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def guarded(what: str, implementation: Implementation | None = None) -> Iterator[None]:
    """Run code under test: its warnings are its own business, it prints to standard error, what it raises is Broken."""
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    except (UnsupportedCase, Broken, KeyboardInterrupt, TimeIsUp):
        raise
    except BaseException as error:  # pytest's skip is no Exception either
        raise Broken("exception", "", f"{what} raised {told(error)}", _frames(error, implementation)) from error


def _frames(error: BaseException, implementation: Implementation | None) -> tuple[str, ...]:
    """The innermost frames of a traceback, without normcheck's own around the call; one is the implementation's.

    What was raised while another exception was handled ends with that one: it is the cause.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in _OWN_FILES]
    file = source_location.of(implementation).file if implementation else ""
    own, shown_frames = [f for f in frames if f.filename == file][-1:], frames[-_FRAMES:]
    if own and own[0] not in shown_frames:
        shown_frames = [*own, *shown_frames[1:]]
    lines = tuple(f"{f.filename}:{f.lineno} in {f.name}: {(f.line or '')[:400]}" for f in shown_frames)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return lines if cause is None else (*lines, f"because of {one_line(told(cause), 400)}")


_PLAIN = bool | int | float | str | None
"""What a backward gets as its forward returned it, and what nobody checks."""


def _named(returned: object, what: str, required: str) -> dict[str, object]:
    """The tensors and plain values of ``returned``, by name. Raises Broken for anything but y, or a dict with it."""
    if isinstance(returned, Tensor) and required == "y":
        return {"y": returned}
    if not isinstance(returned, Mapping):
        expected = "y, a tensor, or a dict such as {'y': y, 'rstd': rstd}"
        if required != "y":
            expected = "a dict with 'dx', 'dw' and, with a bias, 'db'"
        of = one_line(type(returned).__name__, 60)
        raise Broken("missing", required, f"{what} returned {of}: expected {expected}")
    with guarded(f"reading what {what} returned"):
        items = {one_line(str(name), 60): value for name, value in returned.items()}
    if required == "y" and not isinstance(items.get("y"), Tensor):
        got = f"y={one_line(type(items['y']).__name__, 60)}" if "y" in items else str(sorted(items))
        expected = "a tensor" if "y" in items else "'y' among them"
        raise Broken("missing", "y", f"{what} returned {got}: expected {expected}")
    return {name: value for name, value in items.items() if isinstance(value, (Tensor, _PLAIN))}


def _tensors(named: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _settled(named: Callable[[], dict[str, object]], tensor: Tensor) -> dict[str, object]:
    """What is ``named`` once the device has done everything, also on streams of which nobody knows.

    Who uses a result waits for the current stream only. So what changes after that was returned too early.
    """
    if not tensor.is_cuda:
        return named()
    torch.cuda.current_stream(tensor.device).synchronize()
    found = named()
    small = {
        n: t.detach() for n, t in _tensors(found).items() if t.is_cuda and t.numel() * t.element_size() <= _SNAPSHOT
    }
    early = {n: t.clone() for n, t in small.items() if t.layout == torch.strided}
    _synchronise(tensor)
    for name, before in early.items():
        if not guard_bands.same_bits(before, small[name]):
            message = f"{name} was still being written, by another stream, when it was returned"
            raise Broken("not_repeatable", name, message)
    return found


def _synchronise(tensor: Tensor) -> None:
    """Wait for the device, so that a kernel's failure surfaces in the call that caused it."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
