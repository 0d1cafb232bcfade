"""The trial of the fused judge: one right and one wrong case in each process, judged beside the plain judge."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.inputs import Inputs, make, torch_dtype
from normcheck.cases.op import Op
from normcheck.errors import NormcheckError
from normcheck.oracle import bitmask, reference
from normcheck.oracle.compare import Comparison
from normcheck.oracle.fused import judge as fused
from normcheck.oracle.judge import Judge, judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.judge_forward import judge_forward
from normcheck.oracle.tolerances import Model

SLIVER = 2.0**-16
"""What a ratio of the fused judge may differ from that of the plain one, relative to it."""

_NOISE = 2.0**-20  # of a bound: what an error that is far below it may differ, being a difference of large numbers
_CLIPS = (-0.5, 2.0)
_WORTH_SECONDS, _WORTH_SECONDS_IN_CROWD = 0.5, 2.0
"""So many seconds of the plain judge are worth a trial: more, if others want the cores for which it compiles."""

_PLAIN_SECONDS, _PLAIN_ELEMENT_SECONDS = 1e-2, 2e-9  # that it takes on a GPU, for a case and beside that for an element
_AT_ONCE = ("cpu",)  # devices on which the first case waits for a trial


@dataclass(frozen=True)
class Key:
    """What the fused judge is compiled for: a trial of its own."""

    op: Op
    model: Model
    dtype: str
    weight: bool
    weight_dtype: str
    bias: bool
    outputs: frozenset[str]
    packed: bool
    device: torch.device


@dataclass(frozen=True)
class Kernel:
    """What a kernel returns for a case: its outputs, and gradients as autograd would return them."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


class Trial(threading.Thread):
    """A trial that goes on beside. ``failure``: what ended it, None if it passed or goes on."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self._key = key
        self.failure: Exception | None = None

    def run(self) -> None:
        """Hold the two judges together."""
        try:
            hold(self._key)
        except Exception as failure:  # raised in the thread that asks
            self.failure = failure


_trials: dict[Key, Trial] = {}  # that have begun
_beginning = threading.Lock()
in_crowd = False
"""Whether other processes want the cores."""

_asked: dict[Key, float] = {}  # the seconds of the plain judge instead, at most


def is_trusted(judge: Judge, outputs: Mapping[str, Tensor]) -> bool:
    """Whether the fused judge has passed its trial for the op, dtypes, model and outputs at hand in this process.

    On a GPU it begins that trial once the cases at hand are worth the seconds that it compiles for, and says no until
    it has ended; and for ever, if Triton compiles nothing here. On a CPU, where a trial takes some milliseconds, the
    first case waits for it: so the same cases are judged by the same judge in every run. Raises NormcheckError if the
    fused judge has failed: it passed a wrong case, or found another ratio in a right one.
    """
    key = key_of(judge, outputs)
    trial = _trials.get(key)
    if trial is None:
        elements = judge.case.M * judge.case.N
        _asked[key] = _asked.get(key, 0.0) + _PLAIN_SECONDS + elements * _PLAIN_ELEMENT_SECONDS
        at_once = key.device.type in _AT_ONCE
        if _asked[key] < (_WORTH_SECONDS_IN_CROWD if in_crowd else _WORTH_SECONDS) and not at_once:
            return False
        trial = begin(key)
    if key.device.type in _AT_ONCE:
        trial.join()
    if isinstance(trial.failure, NormcheckError):
        raise trial.failure
    return not trial.is_alive() and trial.failure is None


def begin(key: Key) -> Trial:
    """The trial for ``key``, begun if it was not before."""
    with _beginning:
        if key not in _trials:
            trial = Trial(key)
            trial.start()
            _trials[key] = trial
    return _trials[key]


def key_of(judge: Judge, outputs: Mapping[str, Tensor]) -> Key:
    """What a trial depends on, for a kernel that returns these ``outputs``."""
    case = judge.case
    packed = "bitmask" in outputs and outputs["bitmask"].dtype != torch.bool
    model, names = judge.rules.model, frozenset(outputs)
    return Key(judge.op, model, case.dtype, case.weight, case.weight_dtype, case.bias, names, packed, judge.x.device)


def hold(key: Key) -> None:
    """Hold the fused judge against the plain one. Raises NormcheckError."""
    op = key.op
    case = Case(
        op=op.name, dtype=key.dtype, M=7, N=600, rows="shifted", dy="shifted", seed=3,
        weights="probe" if key.weight else NO_WEIGHT, weight_dtype=key.weight_dtype, bias=key.bias,
        options=op.clips(_CLIPS),
    )  # fmt: skip
    inputs = make(case, op, key.device.type)
    judge = judge_of(op, case, inputs, key.model, {}, zeros=True)
    right = right_kernel(op, case, inputs)
    outputs = {name: t for name, t in right.outputs.items() if name in key.outputs}
    if "bitmask" in outputs and not key.packed:
        outputs["bitmask"] = bitmask.unpack(outputs["bitmask"], case.N)
    right = replace(right, outputs=outputs)
    different = disagreement(judge, right)
    if not different:
        wrong = [name for name, kernel in wrong_kernels(right) if _passes(judge, kernel, name)]
        different = f"passes a wrong {', '.join(wrong)}" if wrong else ""
    if different:
        raise NormcheckError(f"judge=fused {different}, in the trial case {case}: use --judge plain, and report this")


def disagreement(judge: Judge, kernel: Kernel, *, own_bits: bool = False) -> str:
    """In what the two judges differ about a right kernel, in words; "" if they agree."""
    checked, saved = judge_forward(judge, kernel.outputs)
    finish, own_saved = fused.forward(judge, kernel.outputs)
    pairs = [(checked, finish())]
    for given in (True, False):
        theirs = judge_gradients(judge, kernel.gradients, saved, given=given, own_bits=own_bits)
        finish = fused.gradients(judge, kernel.gradients, own_saved, given=given, own_bits=own_bits)
        pairs.append((theirs, finish()))
    for theirs, ours in pairs:
        failed = [c.output for c in theirs if not c.comparison.ratio <= 1]
        if ours is None:
            overflowed = any(not bool(torch.isfinite(t.float()).all()) for t in _tensors(kernel))
            return "" if failed or overflowed else "does not pass a right case"
        if failed:
            return f"passes a wrong {failed[0]}"
        if [(c.output, c.check) for c in theirs] != [(c.output, c.check) for c in ours]:
            return f"makes other checks: {[(c.output, c.check) for c in ours]}"
        for one, other in zip(theirs, ours, strict=True):
            if not alike(one.comparison, other.comparison):
                return f"differs in {one.output}, {one.check}: {other.comparison} in place of {one.comparison}"
    for name in ("bits", "ties", "doubt"):
        mask, own_mask = getattr(saved, name), getattr(own_saved, name)
        if mask is not None and not torch.equal(mask, own_mask):
            return f"differs in {int((mask != own_mask).sum())} of the {name}"
    return ""


def _tensors(kernel: Kernel) -> tuple[Tensor, ...]:
    return (*kernel.outputs.values(), *kernel.gradients.values())


def alike(plain: Comparison, ours: Comparison) -> bool:
    """Whether two comparisons agree, up to ``SLIVER``."""
    return (
        abs(plain.ratio - ours.ratio) <= SLIVER * plain.ratio + _NOISE
        and abs(plain.max_abs - ours.max_abs) <= SLIVER * plain.max_abs + _NOISE
        and (plain.numel, plain.uncheckable, plain.zeros) == (ours.numel, ours.uncheckable, ours.zeros)
    )


def _passes(judge: Judge, kernel: Kernel, name: str) -> bool:
    finish, saved = fused.forward(judge, kernel.outputs)
    if name in kernel.outputs:
        return finish() is not None
    return all(fused.gradients(judge, kernel.gradients, saved, given=given)() is not None for given in (True, False))


def right_kernel(op: Op, case: Case, inputs: Inputs) -> Kernel:
    """The outputs of a kernel that computes in fp64 and rounds once, with the statistics that it saves."""
    inputs = inputs.flat(case)
    x, dy = (t.reshape(case.M, case.N).double() for t in (inputs.x, inputs.dy))
    io, g = torch_dtype(case.dtype), reference.scale_of(op, inputs).g
    bias = None if inputs.bias is None else inputs.bias.double()
    exact = reference.normalise(op, x, case.eps)
    mean, rstd = None if exact.mean is None else exact.mean.float(), exact.rstd.float()
    rows = reference.normalise_with(exact, None if mean is None else mean.double(), rstd.double())
    forward = reference.forward(op, rows, g, bias, case.option_values)
    xhat, y = rows.xh, forward.y
    if op.rounds_xhat and case.dtype != "fp32":
        xhat = rows.xh.to(io).double()
        y = xhat * g
    outputs = {"y": y.to(io), "rstd": rstd} | ({} if mean is None else {"mean": mean})
    if op.clamped:
        bits = reference.bits(forward.z, case.option_values)
        outputs["bitmask"] = bitmask.pack(bits)
        exactly = reference.forward(op, exact, g, bias, case.option_values).z  # a backward gets the reference's bits
        dy = dy * reference.bits(exactly, case.option_values)
    gradients = reference.backward(op, rows, g, dy)
    returned = {"dx": gradients.dx.to(io)}
    if inputs.weight is not None:
        returned["dw"] = (dy * xhat).sum(0).to(inputs.weight.dtype)
    if inputs.bias is not None:
        returned["db"] = gradients.db.to(inputs.bias.dtype)
    return Kernel(outputs, returned)


def _another(value: Tensor) -> Tensor:
    """A number, bit or byte of bits in place of ``value`` that no bound allows."""
    if value.dtype == torch.bool:
        return ~value
    return 255 - value if value.dtype == torch.uint8 else value * 1.5 + 0.5


def wrong_kernels(right: Kernel) -> list[tuple[str, Kernel]]:
    """(output, a kernel that is wrong in one element of it), for every output: in the last one, a multiple of it."""
    wrong = []
    for group in ("outputs", "gradients"):
        for name, tensor in getattr(right, group).items():
            changed = tensor.clone()
            last = changed.flatten()[-1:]
            last.copy_(_another(last))
            wrong.append((name, replace(right, **{group: {**getattr(right, group), name: changed}})))
    return wrong
