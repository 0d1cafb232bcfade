"""``normcheck.assert_within``: outputs that somebody has are right, or an AssertionError says where they are not."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normcheck.bounds.expected import parts_of
from normcheck.bounds.given import Given, given
from normcheck.cases.tensor_names import OF_SAMPLES, ROOT_FIRST
from normcheck.checks.finding import mismatch
from normcheck.errors import UsageError, one_of, shown
from normcheck.oracle.compare import Expectation, compare, merge
from normcheck.oracle.distance import moved
from normcheck.oracle.judge import Checked
from normcheck.reports._failure import put_failure
from normcheck.reports.terminal import console_for
from normcheck.result import Finding


def assert_within(
    outputs: Mapping[str, Tensor],
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
) -> None:
    """Raise AssertionError unless every element of ``outputs`` is within its bound; see ``bound`` for the arguments.

    ``outputs``: y, dx, dw and others by name, each of the shape that ``bound`` gives. The text names the worst element,
    its bound with its largest terms, and where the wrong elements lie. Raises UsageError for an output that the op has
    not, or a gradient without ``dy``.
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "dy": dy, "residual": residual, "gate": gate}
    tensors |= {"scale": scale, "shift": shift, "residual_gate": residual_gate, "dresidual_out": dresidual_out}
    tensors |= {"q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    counts = {"groups": groups, "q_heads": q_heads, "k_heads": k_heads}
    about = given(op, tensors, eps=eps, counts=counts, clips=clips, model=model)
    held: dict[str, list[Expectation]] = {}
    for part in parts_of(about, gradients=dy is not None):
        held.setdefault(part.output, []).append(part)
    if not outputs:
        raise UsageError(f"outputs={{}}: expected {one_of(held)}, or several")
    for name, output in outputs.items():
        if name not in held:
            raise UsageError(f"outputs={name}: expected {one_of(held)}" + " (gradients need dy)" * (dy is None))
        if not isinstance(output, Tensor):
            raise UsageError(f"outputs[{name}]={shown(output)}: expected a torch.Tensor")
    wrong = [_finding(about, outputs[name], held[name]) for name in ROOT_FIRST if name in outputs]
    found = [finding for finding in wrong if finding is not None]
    if found:
        raise AssertionError(_text(about, found))


def ulps(a: Tensor, b: Tensor) -> float:
    """The largest distance of two elements at one place, in units in the last place of their dtype.

    ``a``, ``b``: of one shape and one dtype, fp16, bf16 or fp32. Two NaNs are equal; from a NaN to a number it is inf.
    Raises UsageError if shapes or dtypes differ.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise UsageError(
            f"b={tuple(b.shape)} in {b.dtype}: expected shape and dtype of a, {tuple(a.shape)} in {a.dtype}"
        )
    return moved(a, b)[1]


def _finding(about: Given, actual: Tensor, parts: Sequence[Expectation]) -> Finding | None:
    """What is wrong with one output, None if nothing is. Raises UsageError if its shape is not that of the output."""
    whole = torch.Size((sum(part.expected.numel() for part in parts),))
    if actual.numel() != whole.numel():
        raise UsageError(f"{parts[0].output}.shape={tuple(actual.shape)}: expected {whole.numel():,} elements")
    flat, at, compared = actual.detach().reshape(-1), 0, []
    for part in parts:
        size = part.expected.numel()
        compared.append((part.first, compare(flat[at : at + size].reshape(part.expected.shape), part)))
        at += size
    result = merge(compared, about.case.batch if parts[0].output in OF_SAMPLES else about.case.M)
    if result.ratio <= 1:
        return None
    return mismatch(Checked(parts[0].output, parts[0].check, result), about.case, "")


def _text(about: Given, found: Sequence[Finding]) -> str:
    """The report of ``normcheck verify`` on the first wrong output, the root of the others, without a case line."""
    from dataclasses import replace

    stream = io.StringIO()
    first = replace(found[0], case="", also=tuple(other.output for other in found[1:]))
    put_failure(console_for(stream), f"{about.op.name} {about.case.dtype}", first)
    return stream.getvalue().rstrip()
