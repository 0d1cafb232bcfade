"""Faults of calls without a weight, which the paths of most kernels for a weight do not show."""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import BOTH, CLEAN, ZERO_CENTERED, Kernel, KernelCall
from normcheck.audit.mutants.mutant import VALUES, Mutant, Y, implementations, mutant


def _ones_as_weight(c: KernelCall) -> Tensor:
    return c.one_plus(torch.ones_like(c.w) if c.w_io is None else c.w)


def _gamma_of_an_earlier_call() -> Kernel:
    latest: dict[int, Tensor] = {}

    def gamma(c: KernelCall) -> Tensor:
        if c.w_io is None:
            return latest.get(c.N, CLEAN.gamma(c))
        latest[c.N] = CLEAN.gamma(c).clone()
        return latest[c.N]

    return Kernel(gamma=gamma)


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="mN01",
        what="without a weight rstd is not applied: y is x - mean",
        source="invented",
        kernel=Kernel(xhat=lambda c: c.xc if c.w_io is None else CLEAN.xhat(c)),
        outputs=Y,
        when="no weight",
        weights=BOTH,
    ),
    mutant(
        id="mN02",
        what="a weight of ones stands in for none, to which 1 is added: gamma is 2",
        source="invented",
        kernel=Kernel(gamma=_ones_as_weight, gamma_b=_ones_as_weight),
        ops=ZERO_CENTERED,
        outputs=(*Y, "dx"),
        when="no weight",
        weights=BOTH,
    ),
    mutant(
        id="mN03",
        what="without a weight gamma is 0, as if 0 stood in for it and nothing were added",
        source="invented",
        kernel=Kernel(gamma=lambda c: torch.zeros_like(c.w) if c.w_io is None else CLEAN.gamma(c)),
        ops=ZERO_CENTERED,
        outputs=Y,
        when="no weight",
        weights=BOTH,
    ),
    mutant(
        id="mN04",
        what="without a weight that of an earlier call of the same N is taken",
        source="invented",
        kernel=_gamma_of_an_earlier_call,
        outputs=Y,
        kinds=("not_repeatable", *VALUES),
        when="no weight, after a call with one",
        weights=BOTH,
    ),
    mutant(
        id="mN05",
        what="without a weight dx is multiplied by rstd once more",
        source="invented",
        kernel=Kernel(dx=lambda c: CLEAN.dx(c) * (c.r if c.w_io is None else 1)),
        outputs=("dx",),
        when="no weight",
        weights=BOTH,
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
