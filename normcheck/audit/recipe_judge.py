"""Judging an implementation by somebody else's recipe, as its authors would: same inputs, same reference, same words.

Nothing of this gate is used: no fp64 reference, no derived bound, no probe, and the implementation is called in this
process, so none that ends or blocks its process can be judged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from normcheck.audit.recipes import BY_DTYPE, MSE_MEAN, Draw, Recipe, Tolerance
from normcheck.cases.case import Case
from normcheck.cases.claims import unclaimed
from normcheck.cases.dtypes import FORMATS
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.oracle.bitmask import unpack
from normcheck.runner.call import supports

CAUGHT, MISSED, NOT_EXERCISED = "caught", "missed", "not exercised"

_NAMES = {getattr(torch, f.torch_name): f.name for f in FORMATS.values()}
_REQUIRED = ("y", "dx", "dw", "db")
_STATISTICS = ("mean", "rstd")


@dataclass(frozen=True)
class Judgement:
    """What a recipe says of an implementation: ``caught``, ``missed`` or ``not exercised``.

    ``outputs``: those that failed, in the recipe's order, none where the call raised; ``reason``: why the recipe was
    not run, or what was raised.
    """

    status: str
    outputs: tuple[str, ...] = ()
    reason: str = ""

    @property
    def output(self) -> str:
        """The output that failed first, or an empty string."""
        return self.outputs[0] if self.outputs else ""


@dataclass(frozen=True)
class Problem:
    """A recipe's inputs for one op and dtype, and what it expects.

    Shapes: x, dy (M, N); weight, bias (N,). ``expected``: y, dx (M, N), mean, rstd (M,), bitmask bool (M, N),
    dw, db (N,), those of them that the recipe compares and the op has, in the io dtype or, where the recipe does not
    store its reference, fp32. ``clean``: the last clean implementation that ran on it and what that returned.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor | None
    eps: float
    options: Mapping[str, float]
    expected: Mapping[str, Tensor]
    clean: list[tuple[Implementation, dict[str, Tensor]]] = field(default_factory=list)


def judged(recipe: Recipe, mutant: Implementation, clean: Implementation, dtype: str) -> Judgement:
    """What the recipe says of a mutant of ``clean``.

    Not exercised: the recipe has another op or dtype, or every output that it compares is the clean one's bit for bit.
    Hand in the same ``clean`` object each time: its outputs are kept for the next mutant.
    """
    if reason := _outside(recipe, mutant.op, dtype):
        return Judgement(NOT_EXERCISED, reason=reason)
    task = problem(recipe, mutant.op, dtype)
    right = _clean_outputs(task, clean)
    try:
        got = _outputs(mutant, task)
    except Exception as error:
        return Judgement(CAUGHT, reason=f"exception: {type(error).__name__}: {error}")
    if all(_identical(got.get(name), right.get(name)) for name in task.expected):
        return Judgement(NOT_EXERCISED, reason="bit-identical to the clean kernel")
    wanted = {*_REQUIRED, *right}
    return _judgement(recipe, task, {name: got.get(name) for name in task.expected if name in got or name in wanted})


def examined(recipe: Recipe, implementation: Implementation, dtype: str) -> Judgement:
    """What the recipe says of an implementation by itself: of a correct one, ``caught`` is a false alarm.

    Statistics and bitmasks that it does not return are not compared. Not exercised: the recipe has another op or dtype,
    or the implementation does not support the recipe's case, such as one with a bias.
    """
    if reason := _outside(recipe, implementation.op, dtype):
        return Judgement(NOT_EXERCISED, reason=reason)
    task = problem(recipe, implementation.op, dtype)
    case = _case(task, implementation.op, dtype)
    op = discovery.ops()[implementation.op]
    if reason := unclaimed(op, implementation, case) or supports(implementation, case) or "":
        return Judgement(NOT_EXERCISED, reason=reason)
    try:
        got = _outputs(implementation, task)
    except Exception as error:
        return Judgement(CAUGHT, reason=f"exception: {type(error).__name__}: {error}")
    return _judgement(recipe, task, {n: got.get(n) for n in task.expected if n in got or n in _REQUIRED})


@lru_cache(maxsize=24)
def problem(recipe: Recipe, op: str, dtype: str) -> Problem:
    """The recipe's inputs and expectations for one of its ops and dtypes, drawn from its seed."""
    io: torch.dtype = getattr(torch, FORMATS[dtype].torch_name)
    (M, N), generator = recipe.shape(op), torch.Generator().manual_seed(recipe.seed)

    def drawn(draw: Draw, *shape: int) -> Tensor:
        fill = {"randn": torch.randn, "rand": torch.rand}.get(draw.numbers)
        numbers = torch.ones(shape, dtype=io) if fill is None else fill(shape, dtype=io, generator=generator)
        return draw.offset + draw.factor * numbers if (draw.factor, draw.offset) != (1, 0) else numbers

    x, weight = drawn(recipe.x, M, N), drawn(recipe.weight, N)
    bias = None if op in recipe.no_bias else drawn(recipe.bias, N)
    options = dict(zip(("lower_clip", "upper_clip"), recipe.clips, strict=True)) if _clips(op) else {}
    forward, y, leaves = _reference(recipe, op, x, weight, bias, options)
    kept = io if recipe.stored else torch.float32
    dy = None
    if isinstance(recipe.dy, Draw):
        dy = drawn(recipe.dy, M, N)
    elif recipe.dy == MSE_MEAN:
        dy = _mse_gradient(forward["y"], drawn(Draw(), M, N))
    expected = {**forward, **_gradients(y, leaves, dy, kept)}
    compared = {name: expected[name].detach() for name, _ in recipe.tolerances if name in expected}
    return Problem(x, weight, bias, dy, recipe.eps, options, compared)


def _reference(
    recipe: Recipe, op: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, float]
) -> tuple[dict[str, Tensor], Tensor, tuple[Tensor, ...]]:
    """The source's outputs of forward, y (M, N) in fp32 before its store, and the fp32 leaves x, scale, bias of y."""
    scale = weight.float()
    if op == "layernorm_zero_centered":
        scale = (1 + weight).float() if recipe.scale_stored else 1 + scale
    leaves = tuple(t.detach().float().requires_grad_() for t in (x, scale, bias) if t is not None)
    xf, sf, bf = leaves if len(leaves) == 3 else (*leaves, torch.zeros_like(leaves[1]))
    wide, out = xf.detach(), {}
    if op == "rmsnorm":
        product = functional.rms_norm(xf, sf.shape, sf, recipe.eps)
        y = product + bf
        spread = (wide * wide).mean(1)
    else:
        product = y = functional.layer_norm(xf, sf.shape, sf, bf, recipe.eps)
        spread = wide.var(1, unbiased=recipe.unbiased_rstd)
        out["mean"] = wide.mean(1)
    out["rstd"] = torch.rsqrt(spread + recipe.eps)
    if options:
        lower, upper = options["lower_clip"], options["upper_clip"]
        out["bitmask"] = (y > lower) & (y < upper)
        y = y.clamp(lower, upper)
    out["y"] = y.to(x.dtype) if recipe.stored else y
    if recipe.bias_after_store and bias is not None:
        out["y"] = product.to(x.dtype) + bias
    return out, y, leaves


def _case(task: Problem, op: str, dtype: str) -> Case:
    """The case that comes nearest to the recipe's inputs."""
    (M, N), options = task.x.shape, tuple(sorted(task.options.items()))
    return Case(op=op, dtype=dtype, M=M, N=N, eps=task.eps, bias=task.bias is not None, options=options)


def _mse_gradient(y: Tensor, target: Tensor) -> Tensor:
    """dy of the mean squared error in the io dtype: at most 1e-5 in fp16, where a step is 6e-8."""
    leaf = y.detach().requires_grad_()
    return torch.autograd.grad(functional.mse_loss(leaf, target), leaf)[0]


def _gradients(y: Tensor, leaves: tuple[Tensor, ...], dy: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Dx, dw and, with a bias, db by autograd in fp32, rounded to ``dtype``; d(1 + weight) is d(weight)."""
    if dy is None:
        return {}
    gradients = torch.autograd.grad(y, leaves, dy.float())
    return {name: g.to(dtype) for name, g in zip(("dx", "dw", "db"), gradients, strict=False)}


def _outputs(implementation: Implementation, task: Problem) -> dict[str, Tensor]:
    """Call the implementation on its own copies; what it returned, flattened and unpacked as it is compared.

    Backward gets what forward returned, and the same x, weight and bias, as in all the sources.
    """
    by_autograd = implementation.backward is None and task.dy is not None
    x, weight, bias, dy = (None if t is None else t.clone() for t in (task.x, task.weight, task.bias, task.dy))
    leaves = [t.requires_grad_(by_autograd) for t in (x, weight, bias) if t is not None]
    passed = {"eps": task.eps, **task.options}
    with torch.set_grad_enabled(by_autograd):
        returned: Any = implementation.forward(x, weight, bias, **passed)
    out = {"y": returned} if isinstance(returned, Tensor) else dict(returned)
    if by_autograd:
        gradients = torch.autograd.grad(out["y"], leaves, dy, allow_unused=True)
        out |= dict(zip(("dx", "dw", "db"), gradients, strict=False))
    elif dy is not None and implementation.backward is not None:
        with torch.no_grad():
            out |= implementation.backward(dy, x, weight, bias, dict(out), **passed)
    found = {name: out[name].detach() for name in task.expected if out.get(name) is not None}
    return {name: _plain(name, t, task.x.shape[1]) for name, t in found.items()}


def _plain(name: str, t: Tensor, n: int) -> Tensor:
    """Statistics as (M,), a bitmask as bool (M, N), anything else as it is."""
    if name in _STATISTICS:
        return t.reshape(-1)
    if name == "bitmask":
        return t.reshape(-1, n) if t.dtype == torch.bool else unpack(t.reshape(-1, (n + 7) // 8), n)
    return t


def _judgement(recipe: Recipe, task: Problem, got: Mapping[str, Tensor | None]) -> Judgement:
    failed = []
    for name, tolerance in recipe.tolerances:
        if name not in got:
            continue
        expected, actual = task.expected[name], got[name]
        dtype = task.x.dtype if name in _REQUIRED else expected.dtype
        if actual is None or actual.dtype != dtype or not _close(actual.to(expected.dtype), expected, tolerance):
            failed.append(name)
    return Judgement(CAUGHT if failed else MISSED, tuple(failed))


def _close(actual: Tensor, expected: Tensor, tolerance: Tolerance | None) -> bool:
    """Whether assert_close passes two tensors of one dtype: the same shape, every element close, a NaN never."""
    if actual.shape != expected.shape:
        return False
    if expected.dtype == torch.bool:
        return bool(torch.equal(actual, expected))
    allowed = tolerance or BY_DTYPE[_NAMES[expected.dtype]]
    pair = (expected, actual) if allowed.of_actual else (actual, expected)
    return bool(torch.isclose(*pair, rtol=allowed.rtol, atol=allowed.atol).all())


def _identical(a: Tensor | None, b: Tensor | None) -> bool:
    """The same shape, dtype and bits."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def _clean_outputs(task: Problem, clean: Implementation) -> dict[str, Tensor]:
    if not task.clean or task.clean[0][0] is not clean:
        task.clean[:] = [(clean, _outputs(clean, task))]
    return task.clean[0][1]


def _clips(op: str) -> bool:
    return op == "layernorm_relu_bitmask"


def _outside(recipe: Recipe, op: str, dtype: str) -> str:
    """Why the recipe has nothing to say of an op or dtype, or an empty string."""
    if op not in recipe.ops:
        return f"{recipe.name} does not test {op}"
    return f"{recipe.name} does not test {dtype}" if dtype not in recipe.dtypes else ""
