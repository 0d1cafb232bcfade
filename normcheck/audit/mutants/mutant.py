"""A planted fault as data: the few lines in which it differs, its source, and what it should break."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from normcheck.audit.mutants.kernel import CLEAN, OPS, Kernel
from normcheck.cases.dtypes import DTYPES
from normcheck.impls.implementation import Implementation

VALUES = ("mismatch", "non_finite")
"""The kinds of finding that report a wrong value."""

UNWRITTEN = ("unwritten", *VALUES)
"""The kinds of finding that report unwritten memory: by what it held before, or by its values."""

READ_BEYOND, WRITTEN_BEYOND = (*VALUES, "out_of_bounds_read"), (*VALUES, "out_of_bounds_write")
"""The kinds of finding that report a read or a write beyond a tensor: by its guard bands, or by wrong values."""

WITHIN_ADDITIONS = 4096
"""``widest`` of a sum over N that is divided by N - 1. It is off by 1 / (N - 1). N - 1 additions may be off by
(N - 1) * 2^-24, which is more from N = 4098 on, and with the other roundings from 4097 on."""

STATS = ("mean", "rstd", "y", "bitmask", "dx", "dw")
"""The outputs that a wrong mean breaks; ``RSTD``: a wrong variance; ``Y``: a wrong value before the clip."""

RSTD = ("rstd", "y", "bitmask", "dx", "dw")
Y = ("y", "bitmask")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A kernel with one thing wrong.

    ``what``: the fault in one line. ``source``: the real bug that it copies, or "invented". ``make(op)`` returns the
    faulty implementation of an op, named by the id. ``dtypes``: those in which it is a fault; in the others the kernel
    computes what the clean one does. ``outputs``: those that may break, as one of ``kinds``; the op need not have all
    of them, and "" stands for the whole call. ``when``: what a case needs for the fault to show, "" if ordinary cases
    suffice. ``promised``: the cheapest profile that promises to kill it. ``device``: "cuda" if it shows on a GPU only.
    ``language``: "triton" for a fault of our Triton kernels, "torch" for one of the clean torch kernel.
    ``not_exercised``: why it cannot be run at all, such as an op that this project does not have. ``kernel`` returns
    the kernel of steps behind ``make``; None if there is none. ``widest``: the last N at which the fault exceeds the
    error of fp32 additions in any order; None if every N does. ``weights``: whether its calls have a weight. ``heads``:
    it shows in heads, and in no other layout; ``weight_layouts``: in these layouts of the weight, and in no other.
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
    weights: tuple[bool, ...] = (True,)
    heads: bool = False
    weight_layouts: tuple[str, ...] = ()


def mutant(
    id: str,
    kernel: Kernel | Callable[[], Kernel],
    *,
    model: Mapping[str, Any] | None = None,
    weights: tuple[bool, ...] = (True,),
    heads: bool = False,
    weight_layouts: tuple[str, ...] = (),
    overwrites: tuple[str, ...] = (),
    **fields: Any,
) -> Mutant:
    """A mutant of the clean torch kernel: ``kernel`` differs from it by the faulty steps. ``fields`` are Mutant's.

    ``model``, ``heads``, ``weight_layouts`` and ``overwrites`` are what its implementations declare.
    Pass a kernel that keeps state as a function that returns a new one, so that each ``make`` starts without state.
    """

    def new_kernel() -> Kernel:
        return kernel if isinstance(kernel, Kernel) else kernel()

    def make(op: str) -> Implementation:
        return new_kernel().implementation(id, op, model=model or {}, overwrites=overwrites, **shown_in)

    shown_in: dict[str, Any] = {"weights": weights, "heads": heads, "weight_layouts": weight_layouts}
    return Mutant(id=id, make=make, kernel=new_kernel, **shown_in, **fields)


class Steps(Protocol):
    """A kernel of an op with inputs by name, as steps: a clean one, but for some."""

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""


def mutant_of(
    id: str,
    what: str,
    kernel: Steps,
    outputs: tuple[str, ...],
    *,
    model: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Mutant:
    """A mutant whose ``kernel`` has the faulty steps; it declares ``model``, or its own convention."""
    declared = {} if model is None else {"model": model}

    def make(op: str) -> Implementation:
        return kernel.implementation(id, op, **declared)

    return Mutant(id=id, what=what, make=make, outputs=outputs, **{"source": "invented", **fields})


def not_exercised(id: str, *, what: str, source: str, outputs: tuple[str, ...], why: str) -> Mutant:
    """A fault of the catalogue that cannot be planted here: ``make`` returns the clean kernel, and nothing runs it."""
    return mutant(id, CLEAN, what=what, source=source, outputs=outputs, not_exercised=why)


def implementations(mutants: tuple[Mutant, ...]) -> tuple[Implementation, ...]:
    """The implementations that a module of mutants declares, so that ``--impl MODULE:ID`` finds each by its id."""
    return tuple(m.make(op) for m in mutants if not m.not_exercised for op in m.ops)
