"""Planted faults that are there in one regime only: the faulty kernel runs within it, the clean one elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants._patched import Patched
from normcheck.audit.mutants.kernel import CLEAN, Kernel, KernelCall
from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import Regime
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import GRADIENTS
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import implementation as triton_kernels

_OF_BACKWARD = (*GRADIENTS, "dy")
"""The outputs that a fault of backward breaks. A fault that breaks others may be in forward."""


def why_not(regime: Regime, mutant: Mutant) -> str:
    """Why a fault makes no sense under a regime, in any op and dtype, or an empty string."""
    if mutant.not_exercised:
        return mutant.not_exercised
    if any(OPS[op].by_name or OPS[op].l2 or OPS[op].grouped for op in mutant.ops):
        return "regimes are those of ops of one input, which return y"
    if False in mutant.weights:
        return "its fault is in calls without a weight, which are a regime of their own"
    if mutant.heads or mutant.weight_layouts:
        return f"it shows in {'heads' if mutant.heads else 'one layout'} only, and regimes have few of them"
    if regime.holds_dy is not None and not set(mutant.outputs) <= set(_OF_BACKWARD):
        return "it may be a fault of forward, which is not given dy"
    if mutant.widest is not None and regime.width > mutant.widest:
        return f"its fault is within what fp32 additions may be off by where N is {regime.width:,}"
    reasons = {regime.why_not(op, dtype) for op in mutant.ops for dtype in mutant.dtypes}
    return "" if "" in reasons else min(reasons)


def cells(regime: Regime, mutant: Mutant) -> tuple[tuple[str, str], ...]:
    """The (op, dtype) in which the fault makes sense under the regime."""
    if why_not(regime, mutant):
        return ()
    return tuple((op, dtype) for op in mutant.ops for dtype in mutant.dtypes if not regime.why_not(op, dtype))


def under(regime: Regime, mutant: Mutant) -> Mutant:
    """``mutant`` with its fault only in the calls of ``regime``; its id is ``ID@REGIME``.

    Both kernels save tensors of the same form, so each kernel's backward can read them. A kernel that keeps state is
    one kernel for all calls in the regime.
    """
    id = f"{mutant.id}@{regime.id}"

    def make(op: str) -> Implementation:
        faulty = divided(regime, mutant, op) or mutant.make(op)
        return _switched(id, regime, faulty, clean(mutant, op))

    what = f"{mutant.what}, {regime.what}"
    return replace(mutant, id=id, what=what, make=make, kernel=None, promised=_promised(regime, mutant))


def _promised(regime: Regime, mutant: Mutant) -> str:
    """The cheapest profile that promises to kill ``mutant`` under ``regime``.

    An interpreted row costs a thousand times as much as another, so a quick core has few rows behind row 4096.
    """
    return "ci" if mutant.language == "triton" and regime.first_row and mutant.promised == "quick" else mutant.promised


def clean(mutant: Mutant, op: str) -> Implementation:
    """``mutant`` without its fault: our Triton kernels, or the clean torch kernel."""
    if isinstance(mutant.make, Patched):
        return mutant.make.without_fault()(op)
    if mutant.language == "triton":
        return triton_kernels(op, name="clean")
    return CLEAN.implementation("clean", op)


def without_fault(regime: Regime, mutant: Mutant) -> Mutant:
    """``under`` of ``mutant`` without its fault. If both have the same bits, the fault has no effect."""
    if mutant.language == "triton":
        return replace(mutant, make=lambda op: clean(mutant, op))
    kernel = (lambda: CLEAN) if is_divided(regime, mutant) else None
    return under(regime, replace(mutant, make=lambda op: clean(mutant, op), kernel=kernel))


def is_divided(regime: Regime, mutant: Mutant) -> bool:
    """Whether the rows before ``regime.first_row`` stay clean. Otherwise a call with more rows is faulty as a whole.

    A kernel of steps can be divided if it has the clean ``finish``; another one may look at whole calls or count them.
    A Triton kernel cannot be divided: its patch is in every program of a launch.
    """
    return bool(regime.first_row) and mutant.kernel is not None and mutant.kernel().finish is CLEAN.finish


def divided(regime: Regime, mutant: Mutant, op: str) -> Implementation | None:
    """The clean kernel on the rows before ``regime.first_row``, the faulty one on the others; None if not divided.

    It takes only calls with more rows than that. A sum over rows is rounded once: the clean kernel's part stays in
    fp32, and the faulty kernel adds its own part before it stores the sum.
    """
    if mutant.kernel is None or not is_divided(regime, mutant):
        return None
    kernel, first = mutant.kernel(), regime.first_row

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, **options: Any) -> Any:
        early = CLEAN.forward(op, x[:first], weight, bias, eps, **options)
        late = kernel.forward(op, x[first:], weight, bias, eps, **options)
        return {name: torch.cat((early[name], late[name])) for name in early}

    def backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        saved: Mapping[str, Tensor],
        *,
        eps: float,
        **options: Any,
    ) -> Any:
        def of(which: Kernel, rows: slice) -> dict[str, Tensor]:
            own = {name: t.reshape(len(x), -1)[rows] for name, t in saved.items()}
            gradients: dict[str, Tensor] = which.backward(op, dy[rows], x[rows], weight, bias, own, eps, **options)
            return gradients

        early = of(replace(CLEAN, store=_sums_unrounded), slice(first))
        late = of(_adding(kernel, early), slice(first, None))
        return {**late, "dx": torch.cat((early["dx"], late["dx"]))}

    return replace(mutant.make(op), forward=forward, backward=backward)


def _sums_unrounded(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    return t if name in ("dw", "db") else t.to(dtype)


def _adding(kernel: Kernel, early: Mapping[str, Tensor]) -> Kernel:
    """``kernel`` that adds the sums of the early rows, dw and db (N,), to its own."""

    def plus(name: str, step: Callable[[KernelCall], Tensor]) -> Callable[[KernelCall], Tensor]:
        return lambda c: early[name] + step(c)

    return replace(kernel, dw=plus("dw", kernel.dw), db=plus("db", kernel.db))


def _switched(name: str, regime: Regime, faulty: Implementation, clean: Implementation) -> Implementation:
    assert faulty.backward is not None and clean.backward is not None

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, **options: float) -> Any:
        chosen = faulty if regime.holds(x, weight, bias) else clean
        return chosen.forward(x, weight, bias, **options)

    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, saved: Any, **options: float) -> Any:
        within = regime.holds(x, weight, bias) and (regime.holds_dy is None or regime.holds_dy(dy))
        chosen = (faulty if within else clean).backward
        assert chosen is not None
        return chosen(dy, x, weight, bias, saved, **options)

    return replace(faulty, name=name, forward=forward, backward=backward)
