"""What a planted fault is, as data: the few lines in which it differs, where it comes from, what it should break."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from normcheck.audit.mutants.kernel import CLEAN, OPS, Kernel
from normcheck.cases.dtypes import DTYPES
from normcheck.impls.implementation import Implementation

VALUES = ("mismatch", "non_finite")
"""The kinds of finding that a wrong value is."""

UNWRITTEN = ("unwritten", *VALUES)
"""What memory that is left unwritten is found as: by what it held before, or by its values."""

WITHIN_ADDITIONS = 4096
"""``widest`` of a sum over N that is divided by N - 1: off by 1 / (N - 1), which is less than the (N - 1) * 2^-24 that
N - 1 additions may be off by from N = 4098 on, and with the roundings beside them from 4097 on."""

STATS = ("mean", "rstd", "y", "bitmask", "dx", "dw")
"""What a wrong mean breaks, ``RSTD`` what a wrong variance does, ``Y`` what a wrong value before the clip does."""

RSTD = ("rstd", "y", "bitmask", "dx", "dw")
Y = ("y", "bitmask")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A kernel with one thing wrong.

    ``what`` says it in one line; ``source`` is the real bug that it copies, or "invented". ``make(op)`` is the faulty
    implementation of an op, named by the id. ``dtypes``: those in which it is a fault at all; elsewhere the kernel is
    the clean one. ``outputs`` may break (those of them that the op has; "" stands for the whole call), as one of
    ``kinds``. ``when``: what a case needs for it to show, "" where ordinary cases do. ``promised``: the least profile
    that promises to kill it. ``device``: "cuda" where it shows on a GPU only. ``language``: "triton" where it is a
    fault of our Triton kernels, not of the clean torch kernel. ``not_exercised``: why it cannot be run at all, such as
    an op that this project does not have. ``kernel`` makes the kernel that ``make`` gives as an implementation; None
    if that is no kernel of steps. ``widest``: the last N at which the fault is more than fp32 additions, in whatever
    order, may be off by; None if it is at every N.
    """

    id: str
    what: str
    source: str
    make: Callable[[str], Implementation]
    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = DTYPES
    outputs: tuple[str, ...]
    kinds: tuple[str, ...] = VALUES
    when: str = ""
    promised: str = "quick"
    device: str = ""
    language: str = "torch"
    not_exercised: str = ""
    kernel: Callable[[], Kernel] | None = None
    widest: int | None = None


def mutant(
    id: str, kernel: Kernel | Callable[[], Kernel], *, model: Mapping[str, Any] | None = None, **fields: Any
) -> Mutant:
    """A mutant of the clean torch kernel: ``kernel`` differs from it by the faulty steps. ``fields`` are Mutant's.

    A kernel that remembers something is given as a function that makes one, so that each ``make`` starts afresh.
    """

    def made() -> Kernel:
        return kernel if isinstance(kernel, Kernel) else kernel()

    def make(op: str) -> Implementation:
        return made().implementation(id, op, model=model or {})

    return Mutant(id=id, make=make, kernel=made, **fields)


def not_exercised(id: str, *, what: str, source: str, outputs: tuple[str, ...], why: str) -> Mutant:
    """A fault of the catalogue that cannot be planted here: ``make`` gives the clean kernel, nothing runs it."""
    return mutant(id, CLEAN, what=what, source=source, outputs=outputs, not_exercised=why)


def implementations(mutants: tuple[Mutant, ...]) -> tuple[Implementation, ...]:
    """What a module of mutants declares, so that ``--impl MODULE:ID`` finds each by its id."""
    return tuple(m.make(op) for m in mutants if not m.not_exercised for op in m.ops)
