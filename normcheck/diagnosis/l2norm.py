"""What a norm by the length of x computes instead: a formula in fp64 that predicts all that a kernel returned.

Each says by what a row is divided, or what dx is made of. The rest is as it should be, or as autograd makes it of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import make, torch_dtype
from normcheck.cases.ops import OPS
from normcheck.checks.check import Result
from normcheck.oracle.conventions import IN_WORDS, OPEN
from normcheck.oracle.l2norm import EPS, MAX
from normcheck.oracle.rounding import half_ulp
from normcheck.oracle.special import is_special
from normcheck.result import Explanation

_KEY = "eps"
_MOST = 1 << 18
_SOME_EPS = (1e-5, 1e-6, 1e-8, 1e-12)
_ROUNDINGS = 32  # of fp32, beside those of the sums
_U = FORMATS["fp32"].u
_LEAST = 2.0**-80  # of a sum of squares, each of which is then a normal number

Length = Callable[[Tensor, float], Tensor]
"""x (M, N) in fp64 and eps -> by what each row is divided, (M, 1)."""

Gradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""x and dy (M, N), and by what each row is divided (M, 1) -> dx, and the sizes of what it is made of."""


@dataclass(frozen=True)
class Instead:
    """``words``: what the kernel does, if it divides by this ``length``, and its gradient is this, None the usual.
    ``of``: the convention that alone has such a fault, "" if each has.
    """

    name: str
    words: str
    length: Length | None = None
    gradient: Gradient | None = None
    rounds: bool = False
    of: str = ""


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


_LENGTHS: dict[str, Length] = {
    "sum": lambda x, eps: (_squares(x) + eps).sqrt(),
    "max": lambda x, eps: _squares(x).sqrt().clamp(min=eps),
    "mean": lambda x, eps: (_squares(x) + x.shape[-1] * eps).sqrt(),
}


def _always(eps: float) -> Length:
    return lambda x, given: (_squares(x) + eps).sqrt()


_OF_LENGTH = (
    Instead("length_without_eps", "eps is left out", lambda x, eps: _squares(x).sqrt()),
    Instead("length_plus_eps", "eps is added to |x|, behind the root", lambda x, eps: _squares(x).sqrt() + eps),
    Instead("length_eps_unsquared", "sum(x^2) is compared with eps, which is not squared", lambda x, eps:
            _squares(x).clamp(min=eps).sqrt()),
    Instead("length_eps_squared", "eps is squared before it is added to sum(x^2)",
            lambda x, eps: (_squares(x) + eps * eps).sqrt()),
    Instead("length_of_rmsnorm", "this is an RMSNorm: nothing is divided by sqrt(N)",
            lambda x, eps: (x.square().mean(-1, keepdim=True) + eps).sqrt()),
    Instead("length_squared", "the root is never taken", lambda x, eps: _squares(x) + eps),
    Instead("length_l1", "divides by the sum of |x|", lambda x, eps: x.abs().sum(-1, keepdim=True) + eps),
    Instead("length_of_all_rows", "divides by the length of all rows together",
            lambda x, eps: (_squares(x).sum(0, keepdim=True) + eps).sqrt().expand(x.shape[0], 1)),
)  # fmt: skip


def _projected(dy: Tensor, length: Tensor, of: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """(dy - of * sum(of * dy) * share) / length, and the same of magnitudes."""
    both = of * dy
    dx = (dy - of * (both.sum(-1, keepdim=True) * share)) / length
    return dx, (dy.abs() + of.abs() * (both.abs().sum(-1, keepdim=True) * share)) / length


_OF_GRADIENT = (
    Instead("dx_without_sum", "dx leaves out y * sum(y * dy)", gradient=lambda x, dy, length:
            _projected(dy, length, x, 0.0)),
    Instead("dx_of_mean", "dx takes the mean of y * dy for the sum", gradient=lambda x, dy, length:
            _projected(dy, length, x / length, 1 / x.shape[-1])),
    Instead("dx_of_x", "dx takes x for y", gradient=lambda x, dy, length: _projected(dy, length, x)),
    Instead("dx_past_floor", "dx of a row that is divided by eps has y * sum(y * dy) as well", of=MAX,
            gradient=lambda x, dy, length: _projected(dy, length, x / length)),
    Instead("dx_times_length", "dx forgets the division by the length", gradient=lambda x, dy, length:
            _projected(dy, torch.ones_like(length), x / length)),
)  # fmt: skip


def instead(declared: str, dtype: str) -> Iterator[Instead]:
    """What a kernel may do instead, on x in ``dtype``, that declares this convention, or leaves it open."""
    for value in EPS:
        if declared not in (value, OPEN):
            words = f"{IN_WORDS[_KEY][value]}; declared {_KEY}={declared}"
            yield Instead(f"{_KEY}_{value}", words, _LENGTHS[value])
    yield from _OF_LENGTH
    for eps in _SOME_EPS:
        yield Instead(f"length_eps_{eps:g}", f"eps is {eps:g}, whatever it is called with", _always(eps))
    if dtype != "fp32":
        yield Instead("length_in_io", "the length is rounded to the dtype of x", rounds=True)
    yield from _OF_GRADIENT


NAMES = frozenset(told.name for value in (*EPS, OPEN) for told in instead(value, "fp16"))


def explained(failed: Result, others: Iterable[Result]) -> Explanation | None:
    """The one thing that a kernel does instead, if it explains the ``failed`` result and each of the ``others``."""
    every = list(instead(_declared(failed), failed.case.dtype))
    left, seen = every, 0
    for result in (failed, *others):
        if _is_usable(result):
            left, seen = [each for each in left if _fits(result, each)], seen + 1
            if not left:
                return None
    if seen < 2 or len(left) != 1:
        return None
    elements = sum(c.comparison.numel for c in failed.wrong)
    return Explanation(name=left[0].name, words=left[0].words, cases=seen, elements=elements, others=len(every) - 1)


def tells(result: Result, name: str) -> bool:
    """Whether nothing but what is called ``name`` explains the result alone."""
    if not _is_usable(result):
        return False
    return all(each.name == name or not _fits(result, each) for each in instead(_declared(result), result.case.dtype))


def _declared(result: Result) -> str:
    return OPEN if _KEY in result.open else result.model.eps


def _is_usable(result: Result) -> bool:
    case = result.case
    special = is_special(case) or case.rows == "largest"
    return "y" in result.seen.outputs and not special and case.M > 0 and case.room <= _MOST


def _fits(result: Result, told: Instead) -> bool:
    """Whether all that was returned is as ``told`` predicts, in a convention that the kernel leaves open."""
    declared = _declared(result)
    every = EPS if declared == OPEN else (declared,)
    return any(_fits_in(result, told, how) for how in every if told.of in ("", how))


def _fits_in(result: Result, told: Instead, how: str) -> bool:
    case = result.case
    inputs = make(case, OPS[case.op], "cpu")
    x, dy = (t.reshape(case.M, case.N).double() for t in (inputs.x, inputs.dy))
    length = told.length or _LENGTHS[how]
    right, wrong = _LENGTHS[how](x, case.eps), length(x, case.eps)
    if told.rounds:
        wrong = right.to(torch_dtype(case.dtype)).double()
    squares = _squares(x)
    known = (squares == 0) | (squares > _LEAST)
    if not _is_near(result.seen.outputs["y"], x / wrong, x.abs() / wrong, known, case):
        return False
    returned = result.seen.gradients.get("dx")
    if returned is None or told.rounds:
        return True
    if told.gradient is not None:
        return _is_near(returned, *told.gradient(x, dy, right), known, case)
    size = _projected(dy, wrong, x / wrong)[1] + _projected(dy, right, x / right)[1]
    by_autograd = _autograd(x, dy, case, length)
    slope = ~torch.isnan(by_autograd).any(-1, keepdim=True)  # a root of 0 has none
    return _is_near(returned, by_autograd, size, known & slope, case) or any(
        _is_near(returned, _gradient(x, dy, each, case, how), size, known, case) for each in (right, wrong)
    )


def _gradient(x: Tensor, dy: Tensor, length: Tensor, case: Case, how: str) -> Tensor:
    """The usual gradient, by this length."""
    dx, _ = _projected(dy, length, x / length)
    return torch.where(_squares(x).sqrt() < case.eps, dy / length, dx) if how == MAX else dx


def _autograd(x: Tensor, dy: Tensor, case: Case, length: Length) -> Tensor:
    """The gradient of x over this length."""
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(leaf / length(leaf, case.eps), leaf, dy)
    return dx


def _is_near(actual: Tensor, predicted: Tensor, size: Tensor, known: Tensor, case: Case) -> bool:
    """Whether every element is ``predicted``, up to fp32's roundings of terms of this ``size`` and that of the store.

    ``known``, bool (M, 1): the rows whose squares fp32 does not flush.
    """
    actual = actual.detach().cpu().reshape(predicted.shape).double()
    off = size * ((_ROUNDINGS + case.N) * _U) + 2.0**-120
    off = off + (half_ulp(predicted.abs() + off, FORMATS[case.dtype]) if case.dtype != "fp32" else 0.0)
    finite = torch.isfinite(predicted) & (predicted.abs() + off < FORMATS[case.dtype].max)
    near = torch.where(torch.isnan(predicted), ~torch.isfinite(actual), (actual - predicted).abs() <= off)
    return bool((near | ~(known & (finite | torch.isnan(predicted)))).all())
