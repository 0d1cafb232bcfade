"""The judge that applies another project's recipe as its authors do: their inputs, reference and comparison.

It uses nothing of this gate: no fp64 reference, no derived bound, no probe. It calls the implementation in this
process, so it cannot judge one that ends or blocks its process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from normcheck.audit.recipes import MSE_MEAN, Draw, Drawing, FixedTolerance, Recipe, Tolerance
from normcheck.cases.case import GIVEN_SCALES, RETURNED, Case
from normcheck.cases.claims import scales_of, unclaimed
from normcheck.cases.dtypes import CODES, FORMATS
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import CODES as Q
from normcheck.cases.tensor_names import GRADIENTS, RESIDUAL_OUT, SCALE, STATISTICS
from normcheck.impls.implementation import Implementation
from normcheck.oracle.bitmask import unpack
from normcheck.runner.call import supports

CAUGHT, MISSED, NOT_EXERCISED = "caught", "missed", "not exercised"

_NAMES = {getattr(torch, f.torch_name): f.name for f in FORMATS.values()}
_E4M3FN = CODES["e4m3fn"]
_REQUIRED = ("y", Q, RESIDUAL_OUT, *GRADIENTS)


@dataclass(frozen=True)
class Judgement:
    """A recipe's verdict on an implementation; ``status`` is ``caught``, ``missed`` or ``not exercised``.

    ``outputs``: the outputs that failed, in the recipe's order; empty if the call raised. ``reason``: why the recipe
    was not run, or what the call raised.
    """

    status: str
    outputs: tuple[str, ...] = ()
    reason: str = ""

    @property
    def output(self) -> str:
        """The output that failed first, or an empty string."""
        return self.outputs[0] if self.outputs else ""


@dataclass(frozen=True)
class Task:
    """A recipe's inputs for one call of an op in a dtype, and the outputs that it expects.

    Shapes: x, dy, residual (M, N); weight, bias (N,); scale (1,) in fp32. The rows of x and residual may have gaps.
    ``expected``: y, residual_out, dx (M, N), mean, rstd (M,), bitmask bool (M, N), dw, db (N,); only the outputs that
    the recipe compares and the op has. They are in the io dtype, or in fp32 if the recipe does not store its reference.
    An op that returns codes has q (M, N) in e4m3fn in place of y.
    ``clean``: the last clean implementation that ran on this, with its outputs.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor | None
    residual: Tensor | None
    scale: Tensor | None
    eps: float
    options: Mapping[str, float]
    expected: Mapping[str, Tensor]
    clean: list[tuple[Implementation, dict[str, Tensor]]] = field(default_factory=list)


def judge_mutant(recipe: Recipe, mutant: Implementation, clean: Implementation, dtype: str) -> Judgement:
    """The recipe's verdict on a mutant of ``clean``.

    Not exercised: the recipe lacks the op or dtype, each output that it compares has the bits of the clean one, or the
    mutant returns a scale, or other codes.
    Pass the same ``clean`` object each time: its outputs are kept for the next mutant.
    """
    if reason := _outside(recipe, mutant.op, dtype) or _returns_its_scale(mutant):
        return Judgement(NOT_EXERCISED, reason=reason)
    return _summed(_on_mutant(recipe, mutant, clean, task) for task in tasks_of(recipe, mutant.op, dtype))


def judge_kernel(recipe: Recipe, implementation: Implementation, dtype: str) -> Judgement:
    """The recipe's verdict on an implementation by itself; if that is correct, ``caught`` is a false alarm.

    Statistics and bitmasks that it does not return are not compared. Not exercised: the recipe lacks the op or dtype,
    or the implementation supports none of the recipe's cases, such as one with a bias.
    """
    if reason := _outside(recipe, implementation.op, dtype):
        return Judgement(NOT_EXERCISED, reason=reason)
    return _summed(
        _on_kernel(recipe, implementation, task, dtype) for task in tasks_of(recipe, implementation.op, dtype)
    )


def _on_mutant(recipe: Recipe, mutant: Implementation, clean: Implementation, task: Task) -> Judgement:
    of_clean = _clean_outputs(task, clean)
    try:
        actual = _outputs(mutant, task)
    except Exception as error:
        return Judgement(CAUGHT, reason=f"exception: {type(error).__name__}: {error}")
    if reason := _of_other_codes(actual):
        return Judgement(NOT_EXERCISED, reason=reason)
    if all(_identical(actual.get(name), of_clean.get(name)) for name in task.expected):
        return Judgement(NOT_EXERCISED, reason="bit-identical to the clean kernel")
    compared = {*_REQUIRED, *of_clean, *actual}
    return _judgement(recipe, task, {name: actual.get(name) for name in task.expected if name in compared})


def _on_kernel(recipe: Recipe, implementation: Implementation, task: Task, dtype: str) -> Judgement:
    case = _case(task, implementation.op, dtype)
    if reason := unclaimed(OPS[implementation.op], implementation, case) or supports(implementation, case) or "":
        return Judgement(NOT_EXERCISED, reason=reason)
    try:
        actual = _outputs(implementation, task)
    except Exception as error:
        return Judgement(CAUGHT, reason=f"exception: {type(error).__name__}: {error}")
    if reason := _of_other_codes(actual):
        return Judgement(NOT_EXERCISED, reason=reason)
    return _judgement(recipe, task, {n: actual.get(n) for n in task.expected if n in actual or n in _REQUIRED})


def _summed(judgements: Iterable[Judgement]) -> Judgement:
    """One judgement of all calls: the first that is caught, else one that is missed; no call is made after a catch."""
    last = Judgement(NOT_EXERCISED)
    for judgement in judgements:
        if judgement.status == CAUGHT:
            return judgement
        last = last if last.status == MISSED else judgement
    return last


@lru_cache(maxsize=24)
def tasks_of(recipe: Recipe, op: str, dtype: str) -> tuple[Task, ...]:
    """The recipe's inputs and expectations for one of its ops and dtypes, in the order of ``Recipe.inputs_of``."""
    return tuple(_task(recipe, OPS[op], dtype, drawing) for drawing in recipe.inputs_of(op))


def _task(recipe: Recipe, op: Op, dtype: str, drawing: Drawing) -> Task:
    io: torch.dtype = getattr(torch, FORMATS[dtype].torch_name)
    (M, N), generator = drawing.shape, torch.Generator().manual_seed(drawing.seed)

    def drawn(draw: Draw, *shape: int) -> Tensor:
        fill = {"randn": torch.randn, "rand": torch.rand}.get(draw.numbers)
        numbers = torch.ones(shape, dtype=io) if fill is None else fill(shape, dtype=io, generator=generator)
        factor = draw.factor / N if draw.over_n else draw.factor
        return draw.offset + factor * numbers if (factor, draw.offset) != (1, 0) else numbers

    x, weight = drawn(recipe.x, M, drawing.width * N)[:, :N], drawn(recipe.weight, N)
    bias = None if op.name in recipe.no_bias or not op.takes_bias else drawn(recipe.bias, N)
    residual = drawn(recipe.residual, M, drawing.width * N)[:, :N] if op.adds_residual else None
    options = dict(op.clips(recipe.clips))
    forward, y, leaves = _reference(recipe, op, x, weight, bias, residual, options)
    scale = None if drawing.scale is None else torch.tensor([drawing.scale])
    if op.quantises and scale is not None:
        t = (y.detach() * (1.0 / scale)).clamp(-_E4M3FN.max, _E4M3FN.max)
        forward[Q] = t.to(getattr(torch, _E4M3FN.torch_name))
    kept = io if recipe.stored else torch.float32
    dy = None
    if isinstance(recipe.dy, Draw):
        dy = drawn(recipe.dy, M, N)
    elif recipe.dy == MSE_MEAN:
        dy = _mse_gradient(forward["y"], drawn(Draw(), M, N))
    expected = {**forward, **_gradients(y, leaves, dy, kept)}
    compared = {name: expected[name].detach() for name, _ in recipe.tolerances if name in expected}
    return Task(x, weight, bias, dy, residual, scale, recipe.eps, options, compared)


def _reference(
    recipe: Recipe,
    op: Op,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    options: Mapping[str, float],
) -> tuple[dict[str, Tensor], Tensor, tuple[Tensor, ...]]:
    """The source's outputs of forward, y (M, N) in fp32 before its store, and the fp32 leaves x, scale, bias of y.

    With a residual, the first leaf is the sum.
    """
    scale = weight.float()
    if op.zero_centered:
        scale = (1 + weight).float() if recipe.scale_stored else 1 + scale
    added = x.float() if residual is None else x.float() + residual.float()
    leaves = tuple(t.detach().float().requires_grad_() for t in (added, scale, bias) if t is not None)
    xf, sf, bf = leaves if len(leaves) == 3 else (*leaves, torch.zeros_like(leaves[1]))
    wide, out = xf.detach(), {}
    if residual is not None:
        out[RESIDUAL_OUT] = wide.to(x.dtype) if recipe.stored else wide
    if op.centered:
        product = y = functional.layer_norm(xf, sf.shape, sf, bf, recipe.eps)
        spread = wide.var(1, unbiased=recipe.unbiased_rstd)
        out["mean"] = wide.mean(1)
    else:
        product = functional.rms_norm(xf, sf.shape, sf, recipe.eps)
        y = product + bf
        spread = (wide * wide).mean(1)
    out["rstd"] = torch.rsqrt(spread + recipe.eps)
    if options:
        lower, upper = options["lower_clip"], options["upper_clip"]
        out["bitmask"] = (y > lower) & (y < upper)
        y = y.clamp(lower, upper)
    out["y"] = y.to(x.dtype) if recipe.stored else y
    if recipe.weight_after_store:
        out["y"] = functional.rms_norm(wide, sf.shape, None, recipe.eps).to(x.dtype) * weight
    if recipe.bias_after_store and bias is not None:
        out["y"] = product.to(x.dtype) + bias
    return out, y, leaves


def _case(task: Task, op: str, dtype: str) -> Case:
    """The case that is nearest to the recipe's inputs, for ``supports``."""
    (M, N), options = task.x.shape, tuple(sorted(task.options.items()))
    gap = task.x.stride(0) - N
    layout = "x_strided" if gap else "contiguous"
    bias, scale = task.bias is not None, RETURNED if task.scale is None else GIVEN_SCALES[0]
    return Case(
        op=op, dtype=dtype, M=M, N=N, eps=task.eps, bias=bias, layout=layout, gap=gap, options=options, scale=scale
    )


def _mse_gradient(y: Tensor, target: Tensor) -> Tensor:
    """dy (M, N) of the mean squared error, in the io dtype: at most 1e-5 in fp16, which has steps of 6e-8 there."""
    leaf = y.detach().requires_grad_()
    return torch.autograd.grad(functional.mse_loss(leaf, target), leaf)[0]


def _gradients(y: Tensor, leaves: tuple[Tensor, ...], dy: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients dx, dw and, with a bias, db by autograd in fp32, rounded to ``dtype``.

    The leaf of dw may be 1 + weight, whose gradient is that of weight.
    """
    if dy is None:
        return {}
    gradients = torch.autograd.grad(y, leaves, dy.float())
    return {name: g.to(dtype) for name, g in zip(GRADIENTS, gradients, strict=False)}


def _outputs(implementation: Implementation, task: Task) -> dict[str, Tensor]:
    """Call the implementation on copies of the inputs; its outputs, flattened and unpacked for the comparison.

    Backward gets the outputs of forward, and the same x, weight and bias, as in all the sources.
    """
    by_autograd = implementation.backward is None and task.dy is not None
    x, weight, bias, dy, residual = (
        None if t is None else _copy(t) for t in (task.x, task.weight, task.bias, task.dy, task.residual)
    )
    leaves = [t.requires_grad_(by_autograd) for t in (x, weight, bias) if t is not None]
    tensors = {"residual": residual, SCALE: None if task.scale is None else task.scale.clone()}
    passed = {"eps": task.eps, **task.options, **{name: t for name, t in tensors.items() if t is not None}}
    with torch.set_grad_enabled(by_autograd):
        returned: Any = implementation.forward(x, weight, bias, **passed)
    main = OPS[implementation.op].main_output
    if isinstance(returned, tuple):  # of an op that adds a residual
        returned = dict(zip((main, RESIDUAL_OUT), returned, strict=True))
    out = {main: returned} if isinstance(returned, Tensor) else dict(returned)
    if by_autograd:
        gradients = torch.autograd.grad(out["y"], leaves, dy, allow_unused=True)
        out |= dict(zip(GRADIENTS, gradients, strict=False))
    elif dy is not None and implementation.backward is not None:
        with torch.no_grad():
            out |= implementation.backward(dy, x, weight, bias, dict(out), **passed)
    compared = {name: out[name].detach() for name in task.expected if out.get(name) is not None}
    return {name: _plain(name, t, task.x.shape[1]) for name, t in compared.items()}


def _copy(t: Tensor) -> Tensor:
    """A copy with the strides of t, and with the gaps between its rows."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,))
    return memory.clone().as_strided(t.shape, t.stride())


def _plain(name: str, t: Tensor, n: int) -> Tensor:
    """Statistics as (M,), a bitmask as bool (M, N), anything else as it is."""
    if name in STATISTICS:
        return t.reshape(-1)
    if name == "bitmask":
        return t.reshape(-1, n) if t.dtype == torch.bool else unpack(t.reshape(-1, (n + 7) // 8), n)
    return t


def _judgement(recipe: Recipe, task: Task, outputs: Mapping[str, Tensor | None]) -> Judgement:
    failed = []
    for name, tolerance in recipe.tolerances:
        if name not in outputs:
            continue
        expected, actual = task.expected[name], outputs[name]
        dtype = task.x.dtype if name in _REQUIRED and name != Q else expected.dtype
        if actual is None or actual.dtype != dtype or not _close(actual.to(expected.dtype), expected, tolerance):
            failed.append(name)
    return Judgement(CAUGHT if failed else MISSED, tuple(failed))


def _close(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    """Whether assert_close passes two tensors of one dtype: the same shape, every element close, and no NaN."""
    if actual.shape != expected.shape:
        return False
    if expected.dtype == torch.bool:
        return bool(torch.equal(actual, expected))
    allowed: FixedTolerance = (
        tolerance if isinstance(tolerance, FixedTolerance) else getattr(tolerance, _NAMES[expected.dtype])
    )
    if expected.element_size() == 1:  # codes are compared as the numbers that they stand for
        actual, expected = actual.float(), expected.float()
    pair = (expected, actual) if allowed.of_actual else (actual, expected)
    return bool(torch.isclose(*pair, rtol=allowed.rtol, atol=allowed.atol).all())


def _of_other_codes(outputs: Mapping[str, Tensor]) -> str:
    """Why a recipe, whose codes are e4m3fn, does not apply to what was returned, or an empty string."""
    if Q not in outputs or outputs[Q].dtype == getattr(torch, _E4M3FN.torch_name):
        return ""
    return f"its codes are {str(outputs[Q].dtype).removeprefix('torch.')}, not {_E4M3FN.name}"


def _returns_its_scale(implementation: Implementation) -> str:
    """Why a recipe that gives the scale does not apply to an implementation, or an empty string."""
    op = OPS[implementation.op]
    return "it returns its scale" if op.quantises and RETURNED in scales_of(op, implementation) else ""


def _identical(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both have the same shape, dtype and bits, or both are missing."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def _clean_outputs(task: Task, clean: Implementation) -> dict[str, Tensor]:
    if not task.clean or task.clean[0][0] is not clean:
        task.clean[:] = [(clean, _outputs(clean, task))]
    return task.clean[0][1]


def _outside(recipe: Recipe, op: str, dtype: str) -> str:
    """Why the recipe does not apply to an op or dtype, or an empty string."""
    if op not in recipe.ops:
        return f"{recipe.name} does not test {op}"
    return f"{recipe.name} does not test {dtype}" if dtype not in recipe.dtypes else ""
