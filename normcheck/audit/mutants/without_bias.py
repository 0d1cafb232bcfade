"""Faults of calls without a bias: many kernels have a path of their own for these."""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import CLEAN, LAYERNORMS, Kernel, KernelCall
from normcheck.audit.mutants.mutant import VALUES, Mutant, Y, implementations, mutant

_WHEN = "no bias"


def _kept_bias() -> Kernel:
    kept = torch.zeros(0)

    def preact(c: KernelCall) -> Tensor:
        nonlocal kept
        if c.b is not None:
            kept = c.b.clone()
            return CLEAN.preact(c)
        z = CLEAN.preact(c)
        width = min(len(kept), c.N)
        z[:, :width] += kept[:width].to(z.device)
        return z

    return Kernel(preact=preact)


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="no-bias-weight-missing",
        what="without a bias the weight is not applied either",
        source="pytorch/pytorch#69208",
        kernel=Kernel(preact=lambda c: c.xh if c.b is None else CLEAN.preact(c)),
        outputs=Y,
        when=_WHEN,
    ),
    mutant(
        id="no-bias-last-added",
        what="without a bias the one of an earlier call is added",
        source="invented",
        kernel=_kept_bias,
        outputs=Y,
        kinds=(*VALUES, "not_repeatable"),
        when=f"{_WHEN}, after a call with one",
    ),
    mutant(
        id="no-bias-dx-mean-missing",
        what="without a bias dx is that of an RMSNorm: mean(dy * gamma) is not subtracted",
        source="invented",
        kernel=Kernel(mean2=lambda c: c.zeros if c.b_io is None else CLEAN.mean2(c)),
        ops=LAYERNORMS,
        outputs=("dx",),
        when=_WHEN,
    ),
    mutant(
        id="no-bias-dw-zero",
        what="dw is summed together with db, and without a bias not at all",
        source="invented",
        kernel=Kernel(dw=lambda c: torch.zeros_like(c.w) if c.b_io is None else CLEAN.dw(c)),
        outputs=("dw",),
        when=_WHEN,
    ),
    mutant(
        id="no-bias-dw-is-db",
        what="without a bias the sum for db is returned as dw",
        source="invented",
        kernel=Kernel(dw=lambda c: CLEAN.db(c) if c.b_io is None else CLEAN.dw(c)),
        outputs=("dw",),
        when=_WHEN,
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
