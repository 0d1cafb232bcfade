"""``normcheck.bound``: what each output of a norm must be, and how far from it an element may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from normcheck.bounds.given import Given, given
from normcheck.cases.tensor_names import OF_SAMPLES, STATISTICS
from normcheck.oracle.compare import Expectation
from normcheck.oracle.expectations import expectations, whole
from normcheck.oracle.judge import END_TO_END, judge_of


@dataclass(frozen=True)
class Expected:
    """One output, in fp64, of the output's shape: |actual - ``value``| <= ``bound``, element by element.

    ``below``: the bound of what is smaller than ``value``, if that is another one; else it is ``bound``. An infinite
    bound says that an element cannot be judged, as one whose square overflows in fp32.
    """

    value: Tensor
    bound: Tensor
    below: Tensor


def bound(
    op: str,
    *,
    x: Tensor,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dy: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual_gate: Tensor | None = None,
    groups: int | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_heads: int | None = None,
    k_heads: int | None = None,
    clips: tuple[float, float] | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Expected]:
    """Output -> what it must be: y, the statistics, residual_out, and with ``dy`` the gradients dx, dw, db and others.

    ``x``, ``dy``, ``residual``, ``dresidual_out``, ``gate``: (..., N) on one device, in fp16, bf16 or fp32; ``weight``,
    ``bias``: (N,), in the dtype of x or fp32; ``scale``, ``shift``, ``residual_gate``: (B, N) beside an x (B, S, N), in
    one of these too. ``groups``: of the channels of an x (B, C, ...), whose weight and bias are (C,). ``q_heads``,
    ``k_heads``: of an x (T, N) of heads, as many of v as of k, with ``q_weight``, ``k_weight`` (D,) and ``cos``,
    ``sin`` (T, pairs), the four in one of these dtypes. ``clips``: the
    limits of a clamped op. ``model``: what a kernel declares, as in an ``Implementation``; if ``op`` leaves a
    convention open it must say which. The bounds are those of ``normcheck verify`` for a kernel that computes in fp32
    (docs/bounds.md derives them). No process is started.

    Raises UsageError with the argument and what was expected.
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "dy": dy, "residual": residual, "gate": gate}
    of_samples = {"scale": scale, "shift": shift, "residual_gate": residual_gate}
    tensors |= {**of_samples, "dresidual_out": dresidual_out}
    tensors |= {"q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    counts = {"groups": groups, "q_heads": q_heads, "k_heads": k_heads}
    about = given(op, tensors, eps=eps, counts=counts, clips=clips, model=model)
    return expected_of(about, parts_of(about, gradients=dy is not None))


def parts_of(about: Given, *, gradients: bool) -> tuple[Expectation, ...]:
    """What the judge would hold each output to, end to end, block by block."""
    judge = judge_of(about.op, about.case, about.inputs, about.model, {})
    names = about.op.gradients(weight=True, bias=True)
    parts = (part for part in expectations(judge, own_bits=True) if part.check == END_TO_END)
    return tuple(part for part in parts if gradients or part.output not in names)


def expected_of(about: Given, parts: Sequence[Expectation]) -> dict[str, Expected]:
    """``parts`` by output, each of the output's shape."""
    found = {}
    for (output, _), both in whole(tuple(parts)).items():
        found[output] = Expected(*(side.reshape(shape_of(about, output, side)) for side in both))
    return found


def shape_of(about: Given, output: str, like: Tensor) -> tuple[int, ...]:
    """The shape of ``output``: of x, of a row's statistics, or of the weight."""
    if output in STATISTICS and about.op.grouped:
        return about.shape[0], about.case.split.groups
    if output in STATISTICS:
        rows = about.shape[:-1]
        return rows if like.numel() == about.case.M else (*rows, -1)
    if output in OF_SAMPLES:
        return about.case.batch, about.case.N
    return about.shape if like.numel() == about.case.M * about.case.N and output not in ("dw", "db") else (-1,)
