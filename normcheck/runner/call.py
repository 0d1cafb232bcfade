"""One call of an implementation's code in this process, and nothing else.

It knows no reference and no bound. Any error of that code is raised as ``Broken``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from normcheck.cases import guard_bands
from normcheck.cases.case import Case, without_seed
from normcheck.cases.guard_bands import NAN, as_integers, in_memory
from normcheck.cases.inputs import COTANGENTS, GRADIENT_OF, NAMED, Inputs
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import CODES, RESIDUAL_OUT, SCALE
from normcheck.errors import Broken, UnsupportedCase, UsageError, error_text, one_line, shown
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels import on_cpu
from normcheck.runner import compiled, overwriting
from normcheck.runner.arena import Arena
from normcheck.runner.kernel_errors import called, guarded

LONGEST_REASON = 500
"""Characters of a reason why an implementation cannot run."""

_SNAPSHOT_BYTES = 1 << 24  # results up to this size are checked for late changes, by streams that are still at work


class _WithoutGpu(TorchFunctionMode):
    """While it is active, what names a GPU gets the CPU. What torch.compile traces is only called."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not torch.compiler.is_compiling():
            func, args, kwargs = on_cpu.without_gpu(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Unwatched:
    """In place of an arena, for calls whose memory is not watched, such as timed ones. ``beside``: see ``Arena``.

    ``waits``: calls wait until a GPU has finished; if not, what is queued on it may still be under way.
    """

    def __init__(self, beside: Mapping[str, object] | None = None, *, waits: bool = True) -> None:
        self.beside, self.waits = beside, waits
        self._for_a_gpu: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        self._for_a_gpu = _WithoutGpu() if on_cpu.answers_for_a_gpu() else nullcontext()
        self._for_a_gpu.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._for_a_gpu.__exit__(*raised)

    def note(self, name: str, settled: Tensor) -> None:
        """See ``Arena``: nobody asks here."""


def forward(implementation: Implementation, case: Case, inputs: Inputs, arena: Arena | Unwatched) -> dict[str, Tensor]:
    """Call forward with ``arena`` active; return its tensors by name, always with the op's main output.

    ``arena`` keeps the plain values that the first forward of a run returned, for the backward. Inputs that the
    implementation may overwrite are put back, unless the gradients are autograd's: the graph behind y may need the
    overwritten values.

    Raises Broken if the code raises, or returns neither that output nor a dict with it; UnsupportedCase if its library
    refuses.
    """
    compiled.prepare(on_gpu=inputs.x.is_cuda)
    of_forward, op = {*implementation.overwrites} - {"dy"}, OPS[case.op]
    restored, lent = ((), of_forward) if implementation.backward is None else (of_forward, ())
    given = overwriting.lent(lent, inputs)
    with guarded("forward", implementation), overwriting.put_back(restored, inputs):
        with arena:
            named_inputs = {**named(given), **case.option_values}
            of_all = (given.x, given.weight, given.bias)
            returned = called(implementation.forward, *of_all, eps=case.eps, **named_inputs)
            values = _named(_of_several(returned, op, inputs), "forward", op.main_output)
            _settle(values, inputs.x, arena)
        if op.adds_residual and of_forward and arena.waits:
            _raise_if_elsewhere(_tensors(values), inputs, of_forward)
        if arena.beside is None:
            arena.beside = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        return overwriting.apart(_tensors(values), inputs)


_WRITTEN_TO = {"x": "y", "residual": RESIDUAL_OUT}
"""Input -> the output that an op that adds a residual writes to its memory, if it is declared to be overwritten."""


def _raise_if_elsewhere(outputs: Mapping[str, Tensor], inputs: Inputs, overwrites: Collection[str]) -> None:
    """Raise Broken unless each of the inputs that the op ``overwrites`` has the bits of its output by now."""
    for name, tensor in inputs.named():
        output = outputs.get(_WRITTEN_TO.get(name, "")) if name in overwrites else None
        if output is None or output.dtype != tensor.dtype or output.numel() != tensor.numel():
            continue
        own, tensor = output.detach().reshape(tensor.shape), tensor.detach()
        if not guard_bands.same_bits(own, tensor):
            differ = f"{guard_bands.how_many_differ(own, tensor)} of {own.numel()} elements differ"
            why = f"{_WRITTEN_TO[name]} was not written to the memory of {name}, as overwrites says: {differ}"
            raise Broken("unwritten", _WRITTEN_TO[name], why)


def backward(
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    saved: Mapping[str, Tensor],
    arena: Arena | Unwatched,
) -> dict[str, Tensor]:
    """Call the implementation's own backward with the ``saved`` tensors; return its gradients by name.

    Inputs that the implementation may overwrite are put back. Raises as ``forward`` does.
    """
    assert implementation.backward is not None
    compiled.prepare(on_gpu=inputs.x.is_cuda)
    with guarded("backward", implementation), overwriting.put_back(implementation.overwrites, inputs):
        with arena:
            returned = called(
                implementation.backward,
                inputs.dy,
                inputs.x,
                inputs.weight,
                inputs.bias,
                {**(arena.beside or {}), **saved},
                eps=case.eps,
                **named(inputs, cotangents=True),
                **case.option_values,
            )
            values = _named(returned, "backward", "dx", inputs.leaves)
            _settle(values, inputs.x, arena)
        return overwriting.apart(_tensors(values), inputs)


def supports(implementation: Implementation, case: Case) -> str | None:
    """The answer of the implementation's own ``supports``: None, or why it cannot run ``case``. Raises Broken.

    It is asked without the seed and the kinds of data: a library has limits of sizes and layouts, and only a cheat
    would ask for more.
    """
    if implementation.supports is None:
        return None
    try:
        with guarded("supports(case)", implementation):
            reason = called(implementation.supports, without_seed(case))
            return None if reason is None else one_line(str(reason), LONGEST_REASON)
    except UnsupportedCase as refused:
        return refusal(refused)


def refusal(refused: UnsupportedCase) -> str:
    """The reason that the library gave, as one line of at most LONGEST_REASON characters."""
    return one_line(error_text(refused).partition(": ")[2], LONGEST_REASON) or "its library gave no reason"


def unavailable(implementation: Implementation, device: str) -> str:
    """Why the implementation cannot run on ``device``, or "". Raises UsageError if its ``unavailable`` fails."""
    if implementation.unavailable is None:
        return ""
    who = f"unavailable(device) of {shown(implementation.name)}"
    try:
        with guarded(who):
            reason = called(implementation.unavailable, device)
    except (Broken, UnsupportedCase) as error:
        raise UsageError(str(error)) from error
    if reason is None:
        return ""
    if not isinstance(reason, str):
        raise UsageError(f"{who} returned {shown(reason)}: expected None or why it cannot run")
    return one_line(reason, LONGEST_REASON)


def model(implementation: Implementation, case: Case) -> Mapping[str, Any]:
    """What the implementation declares about its arithmetic in this case, whatever its data. Raises Broken."""
    declared = implementation.model
    if not callable(declared):
        return declared
    with guarded("model(case)", implementation):
        return called(lambda: dict(declared(without_seed(case))))


def differentiable(inputs: Inputs, wanted: Collection[str] | None = None) -> Inputs:
    """The same inputs as leaves of autograd's graph, for an implementation without its own backward.

    ``wanted``: the names of the gradients that are wanted; None for all. An input of which none is wanted, or which is
    such a leaf, stays the very object, as a parameter does: what a kernel keeps with it is then found when its values
    have changed.
    """
    leaves = {
        GRADIENT_OF[name]: tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        for name, tensor in inputs.leaves.items()
        if wanted is None or name in wanted
    }
    return replace(inputs, **leaves)


def autograd(
    outputs: Mapping[str, Tensor], inputs: Inputs, arena: Arena | Unwatched, *, retain: bool = False
) -> dict[str, Tensor]:
    """Gradients by torch autograd through y, and through residual_out, by name; empty if y has no graph, or one with an
    operator that has no formula of a gradient, as one that only serves.

    ``outputs``: what forward returned for ``inputs``, its leaves, which also have the cotangents. If y is wider than
    dy, autograd itself casts dy to the dtype of y. ``retain``: the graph is kept for another backward.
    """
    if "y" not in outputs or not outputs["y"].requires_grad:
        return {}
    through, cotangents = graph_outputs(outputs, inputs)
    leaves = {name: leaf for name, leaf in inputs.leaves.items() if leaf.requires_grad}
    options = {"allow_unused": True, "retain_graph": retain}
    gradients: Sequence[Tensor | None] = (None,) * len(leaves)
    with guarded("backward, by torch autograd through y,"), arena, without_formula():
        gradients = called(_gradients, through, list(leaves.values()), cotangents, **options)
        if arena.waits:
            _synchronise(inputs.x)
    found = {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return overwriting.apart(found, inputs)


def _checkpoints(outputs: Sequence[Tensor]) -> bool:
    """Whether behind ``outputs`` is a reentrant ``torch.utils.checkpoint``, which no ``torch.autograd.grad`` passes."""
    nodes = [output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is not None and node.name() == "CheckpointFunctionBackward":
            return True
        new = {behind for behind, _ in node.next_functions} - seen if node is not None else set()
        nodes += new
        seen |= new
    return False


def _gradients(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    allow_unused: bool,
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """What ``torch.autograd.grad`` returns, if need be by ``torch.autograd.backward``."""
    if not _checkpoints(outputs):
        return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=retain_graph, allow_unused=allow_unused)
    kept = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
        leaf.retain_grad()
    torch.autograd.backward(outputs, cotangents, retain_graph=retain_graph)
    found = tuple(leaf.grad for leaf in leaves)
    for leaf, grad in zip(leaves, kept, strict=True):
        leaf.grad = grad
    return found


@contextmanager
def without_formula() -> Iterator[None]:
    """Let torch refuse a gradient of an operator by ``custom_op`` for which none was registered."""
    try:
        yield
    except RuntimeError as error:
        if "no autograd formula was registered" not in str(error):
            raise


def graph_outputs(outputs: Mapping[str, Tensor], inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs through which gradients go, y and residual_out if that has a graph, and the cotangent of each that
    has one.
    """
    stored = outputs.get(RESIDUAL_OUT)
    through = [(outputs["y"], inputs.cotangents.get("dy"))]
    if stored is not None and stored.requires_grad:
        through.append((stored, inputs.dresidual_out))
    used = [(output, cotangent) for output, cotangent in through if cotangent is not None]
    return [output for output, _ in used], [cotangent for _, cotangent in used]


def named(inputs: Inputs, *, cotangents: bool = False) -> dict[str, Tensor]:
    """The inputs that a call gets by keyword; ``cotangents``: as a backward."""
    every = [name for name in NAMED if cotangents or name not in COTANGENTS]
    return {name: tensor for name, tensor in inputs.named() if name in every}


def _of_several(returned: object, op: Op, inputs: Inputs) -> object:
    """What a forward returned; a tuple of all that the op owes for these inputs as a dict."""
    owed = [op.main_output, *[SCALE] * (op.quantises and inputs.scale is None), *[RESIDUAL_OUT] * op.adds_residual]
    if isinstance(returned, tuple | list) and len(returned) == len(owed) > 1:
        return dict(zip(owed, returned, strict=True))
    if isinstance(returned, tuple | list) and len(owed) > 1:
        of = f"{one_line(type(returned).__name__, 60)} of {len(returned)}"
        raise Broken("missing", owed[0], f"forward returned {of}: expected {len(owed)}: {', '.join(owed)}")
    return returned


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Have torch fill uninitialised memory with NaN (integers: all ones), so that elements never written show.

    torch.use_deterministic_algorithms(True, warn_only=True) does the same, but imports all of inductor (1.3 s).
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def without_modes() -> Iterator[None]:
    """Have torch ask no mode that code under test has left behind: by one, a look at a result could compute it."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


_PLAIN = bool | int | float | str | None
"""Values that the backward gets as its forward returned them. They are not checked."""


_MOST_VALUES = 256
"""What a call may return, with all that its backward needs: each costs time that no limit counts."""


def _named(returned: object, what: str, required: str, owed: Iterable[str] = ()) -> dict[str, object]:
    """The tensors and plain values of ``returned``, by name.

    ``what``: the function that returned it; ``owed``: the gradients that a backward is asked. Raises Broken for
    anything but a dict or, of a forward, what is ``required``.
    """
    if isinstance(returned, Tensor) and what == "forward":
        return {required: returned}
    if not isinstance(returned, Mapping):
        expected = "y, a tensor, or a dict such as {'y': y, 'rstd': rstd}"
        if required == CODES:
            expected = "q, a tensor, if the scale is given, or a dict such as {'q': q, 'scale': scale}"
        elif required != "y":
            expected = f"a dict with {', '.join(map(repr, owed))}"
        of = one_line(type(returned).__name__, 60)
        raise Broken("missing", required, f"{what} returned {of}: expected {expected}")
    with guarded(f"reading what {what} returned"):
        count = called(len, returned)
        if count > _MOST_VALUES:
            raise Broken("shape", required, f"{what} returned {count} values: expected {_MOST_VALUES} at most")
        items = called(lambda: {one_line(str(name), 60): value for name, value in returned.items()})
    if what == "forward" and not isinstance(items.get(required), Tensor):
        there = required in items
        got = f"{required}={one_line(type(items[required]).__name__, 60)}" if there else str(sorted(items))
        expected = "a tensor" if there else f"{required!r} among them"
        raise Broken("missing", required, f"{what} returned {got}: expected {expected}")
    return {name: value for name, value in items.items() if isinstance(value, (Tensor, _PLAIN))}


def _tensors(named: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _settle(named: Mapping[str, object], tensor: Tensor, arena: Arena | Unwatched) -> None:
    """Wait until the device of ``tensor`` has finished the work of all its streams.

    A caller waits for the current stream only. So a result that changes after that stream's work was returned too
    early, which ``arena`` notes.
    """
    if not (tensor.is_cuda and arena.waits):
        return
    with without_modes():
        bits = _bits_on(tensor.device, _tensors(named))
        early = {n: t.clone() for n, t in bits.items()}
        _synchronise(tensor)
        for name, before in early.items():
            arena.note(name, (before == bits[name]).all())


def _bits_on(device: torch.device, returned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of what lies in the memory of the dense results on ``device``, as integers; without large ones."""
    dense = {n: t for n, t in returned.items() if type(t) in (Tensor, torch.nn.Parameter) and t.device == device}
    plain = {n: t.detach() for n, t in dense.items() if t.layout == torch.strided and t.dtype in NAN.bits}
    return {n: as_integers(in_memory(t)) for n, t in plain.items() if t.numel() * t.element_size() <= _SNAPSHOT_BYTES}


def _synchronise(tensor: Tensor) -> None:
    """Wait for the device, so that a kernel's failure surfaces in the call that caused it."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
