"""A planted fault that is there in one regime only: the faulty kernel within it, the clean one everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants._patched import Patched
from normcheck.audit.mutants.kernel import CLEAN, Kernel, Run
from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import Regime
from normcheck.cases.ops.op import GRADIENTS
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import implementation as triton_kernels

_OF_BACKWARD = (*GRADIENTS, "dy")
"""What a fault of backward breaks; one that breaks more may be in forward."""


def why_not(regime: Regime, mutant: Mutant) -> str:
    """Why a fault makes no sense under a regime, in whatever op and dtype, or an empty string."""
    if mutant.not_exercised:
        return mutant.not_exercised
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
    """``mutant``, whose fault is there only in the calls of ``regime``; its id is ``ID@REGIME``.

    What forward saves is of the same form in and outside of the regime, so each kernel's backward takes it. A kernel
    that remembers something is one kernel for all calls in the regime.
    """
    id = f"{mutant.id}@{regime.id}"

    def make(op: str) -> Implementation:
        faulty = divided(regime, mutant, op) or mutant.make(op)
        return _switched(id, regime, faulty, clean(mutant, op))

    what = f"{mutant.what}, {regime.what}"
    return replace(mutant, id=id, what=what, make=make, kernel=None, promised=_promised(regime, mutant))


def _promised(regime: Regime, mutant: Mutant) -> str:
    """The least profile that promises to kill ``mutant`` under ``regime``.

    Interpreted rows cost a thousand times what others do: those behind row 4096 are few in a quick core.
    """
    return "ci" if mutant.language == "triton" and regime.first_row and mutant.promised == "quick" else mutant.promised


def clean(mutant: Mutant, op: str) -> Implementation:
    """The kernel that ``mutant`` differs from by its fault: our Triton kernels, or the clean torch kernel."""
    if isinstance(mutant.make, Patched):
        return mutant.make.without_fault()(op)
    if mutant.language == "triton":
        return triton_kernels(op, name="clean")
    return CLEAN.implementation("clean", op)


def without_fault(regime: Regime, mutant: Mutant) -> Mutant:
    """What ``under`` makes of ``mutant`` if nothing is wrong with it: its bits tell whether the fault is one."""
    if mutant.language == "triton":
        return replace(mutant, make=lambda op: clean(mutant, op))
    kernel = (lambda: CLEAN) if is_divided(regime, mutant) else None
    return under(regime, replace(mutant, make=lambda op: clean(mutant, op), kernel=kernel))


def is_divided(regime: Regime, mutant: Mutant) -> bool:
    """Whether the rows before ``regime.first_row`` stay clean: else the whole call is faulty, from that many rows on.

    A kernel of steps can be divided if its last step is the clean one: ``finish`` sees, or counts, whole calls. One of
    the Triton kernels cannot: a patch is in every program of a launch.
    """
    return bool(regime.first_row) and mutant.kernel is not None and mutant.kernel().finish is CLEAN.finish


def divided(regime: Regime, mutant: Mutant, op: str) -> Implementation | None:
    """The clean kernel on the rows before ``regime.first_row`` and the faulty one on those behind; None if whole.

    For calls with more rows than that. A sum over the rows is the clean kernel's over the first ones, in fp32, to which
    the faulty kernel adds its own before it stores the sum: it is rounded once.
    """
    if mutant.kernel is None or not is_divided(regime, mutant):
        return None
    kernel, first = mutant.kernel(), regime.first_row

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, **options: float) -> Any:
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
        **options: float,
    ) -> Any:
        def of(which: Kernel, rows: slice) -> dict[str, Tensor]:
            own = {name: t.reshape(len(x), -1)[rows] for name, t in saved.items()}
            found: dict[str, Tensor] = which.backward(op, dy[rows], x[rows], weight, bias, own, eps, **options)
            return found

        early = of(replace(CLEAN, store=_sums_unrounded), slice(first))
        late = of(_adding(kernel, early), slice(first, None))
        return {**late, "dx": torch.cat((early["dx"], late["dx"]))}

    return replace(mutant.make(op), forward=forward, backward=backward)


def _sums_unrounded(c: Run, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    return t if name in ("dw", "db") else t.to(dtype)


def _adding(kernel: Kernel, early: Mapping[str, Tensor]) -> Kernel:
    """``kernel`` with the sums of the early rows in its own."""

    def plus(name: str, step: Callable[[Run], Tensor]) -> Callable[[Run], Tensor]:
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
