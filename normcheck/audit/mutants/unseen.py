"""Faults that hardly any comparison of values sees: reads and writes around a tensor, differences between runs.

Those that read or write a gap need an x of rank 2, the only rank that these kernels claim.
There is no P12: that fault is X10 of ``structure.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import CLEAN, RELU, Kernel, KernelCall
from normcheck.audit.mutants.mutant import READ_BEYOND, STATS, UNWRITTEN, VALUES, Mutant, Y, implementations, mutant


def _behind_rows(c: KernelCall) -> Tensor:
    """(M, 1): the element behind the end of each row of x."""
    return c.x_io.as_strided((c.M, 1), (c.x_io.stride(0), 1), c.x_io.storage_offset() + c.N)


def _gap(c: KernelCall) -> bool:
    return c.x_io.stride(0) > c.N


def _gap_without_nan(c: KernelCall) -> Tensor:
    z = CLEAN.preact(c)
    return z + _behind_rows(c).float().nan_to_num() if _gap(c) else z


def _gap_written(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if _gap(c):
        _behind_rows(c).zero_()
    return out


def _front_written(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if c.x_io.storage_offset():
        c.x_io.as_strided((1,), (1,), c.x_io.storage_offset() - 1).zero_()
    return out


def _rstd_doubled(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if c.dy_io is not None:
        c.saved["rstd"].mul_(2)
    return out


def _bits_turned(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if c.dy_io is not None:
        c.saved["bitmask"].bitwise_not_()
    return out


def _shuffled(c: KernelCall, t: Tensor) -> Tensor:
    return c.mean_n(t[:, torch.rand(c.N, device=t.device).argsort()])


def _every_second_reversed() -> Kernel:
    calls = 0

    def mean1(c: KernelCall) -> Tensor:
        nonlocal calls
        calls += 1
        terms = c.xh * c.wd
        return c.mean_n(terms.flip(1) if calls % 2 else terms)

    return Kernel(mean1=mean1)


def _as_if_packed(t: Tensor, name: str) -> Tensor:
    """A dy whose rows all share one memory, read as packed rows, up to the end of its storage."""
    if name != "dy" or len(t) < 2 or t.stride(0) != 0:
        return t
    rest = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    places = torch.arange(t.numel(), device=t.device).clamp(max=int(rest) - 1)
    return t.as_strided((rest,), (1,))[places].view(t.shape)


def _onto_what_was_there(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    t = t.to(dtype)
    return t + torch.empty_like(t).nan_to_num() if name == "y" else t


def _nothing_for_no_rows(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    t = t.to(dtype)
    return torch.empty_like(t) if name in ("dw", "db") and not c.M else t


def _latest_rstd() -> Kernel:
    latest: list[Tensor] = []

    def rstd_out(c: KernelCall) -> Tensor:
        latest[:] = [c.r]
        return CLEAN.rstd_out(c)

    def xhat_b(c: KernelCall) -> Tensor:
        c.r = latest[0]
        return CLEAN.xhat_b(c)

    return Kernel(rstd_out=rstd_out, xhat_b=xhat_b)


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="P01",
        what="the element behind each row of x is read, times 0",
        source="flashinfer-ai/flashinfer#4480",
        kernel=Kernel(preact=lambda c: CLEAN.preact(c) + 0 * _behind_rows(c).float()),
        outputs=Y,
        kinds=READ_BEYOND,
    ),
    mutant(
        id="P02",
        what="what lies in the gap behind each row of x is added, unless it is NaN",
        source="invented",
        kernel=Kernel(preact=_gap_without_nan),
        outputs=Y,
        kinds=("out_of_bounds_read",),
        when="a gap behind the rows of x, with a finite number in it",
    ),
    mutant(
        id="P03",
        what="a zero is written into the gap behind each row of x",
        source="flashinfer-ai/flashinfer#4480",
        kernel=Kernel(finish=_gap_written),
        outputs=("x",),
        kinds=("out_of_bounds_write",),
        when="a gap behind the rows of x",
    ),
    mutant(
        id="P04",
        what="a zero is written before the first element of x",
        source="invented",
        kernel=Kernel(finish=_front_written),
        outputs=("x",),
        kinds=("out_of_bounds_write",),
    ),
    mutant(
        id="P05",
        what="backward doubles the rstd that forward saved",
        source="invented",
        kernel=Kernel(finish=_rstd_doubled),
        outputs=("rstd", "dx", "dw"),
        kinds=("input_modified", *VALUES),
        when="what was saved is looked at, or used again",
    ),
    mutant(
        id="P06",
        what="backward turns the bits that forward saved",
        source="invented",
        kernel=Kernel(finish=_bits_turned),
        ops=RELU,
        outputs=("bitmask", "dx", "dw", "db"),
        kinds=("input_modified", *VALUES),
        when="what was saved is looked at, or used again",
    ),
    mutant(
        id="P07",
        what="the sums of the statistics are taken in a random order",
        source="invented",
        kernel=Kernel(mean=lambda c: _shuffled(c, c.x), variance=lambda c: _shuffled(c, c.xc * c.xc)),
        outputs=(*STATS, "db"),
        kinds=("not_repeatable",),
        when="a second run, with about M*N > 64: few sums change with their order",
    ),
    mutant(
        id="P08",
        what="every second call of backward sums c1 from the other end",
        source="invented",
        kernel=_every_second_reversed,
        dtypes=("fp32",),  # in half the last bits of c1 are rounded away
        outputs=("dx",),
        kinds=("not_repeatable",),
        when="a second run",
    ),
    mutant(
        id="P09",
        what="a NaN in one row of x makes all of y NaN",
        source="invented",
        kernel=Kernel(preact=lambda c: torch.where(c.x.isnan().any(), torch.nan, CLEAN.preact(c))),
        outputs=Y,
        when="a NaN in one of several rows",
    ),
    mutant(
        id="P10",
        what="a NaN in x is read as 0",
        source="invented",
        kernel=Kernel(load=lambda t, name: torch.where(t.isnan(), 0, t) if name == "x" else t),
        outputs=STATS,
        when="a NaN in x",
    ),
    mutant(
        id="P11",
        what="a dy whose rows share one memory is read as if they were packed",
        source="flagos-ai/FlagGems#1082",
        kernel=Kernel(load=_as_if_packed),
        outputs=("dx", "dw", "db"),
        kinds=READ_BEYOND,
        when="dy is expanded",
    ),
    mutant(
        id="P13",
        what="y is added to what its memory held before, unless that is NaN",
        source="invented",
        kernel=Kernel(store=_onto_what_was_there),
        outputs=("y",),
        kinds=UNWRITTEN,
        when="a finite number in fresh memory",
    ),
    mutant(
        id="P14",
        what="without rows dw and db are not written",
        source="invented",
        kernel=Kernel(store=_nothing_for_no_rows),
        outputs=("dw", "db"),
        kinds=UNWRITTEN,
        when="M = 0",
    ),
    mutant(
        id="P15",
        what="backward takes rstd from the latest forward, not from what was saved for it",
        source="invented",
        kernel=_latest_rstd,
        outputs=("dx", "dw"),
        kinds=("not_repeatable", *VALUES),
        when="another forward comes before backward",
    ),
    mutant(
        id="P16",
        what="a dy below 2^-9 everywhere is taken for 0",
        source="invented",
        kernel=Kernel(wdy=lambda c: CLEAN.wdy(c) * (c.dy.abs() > 2.0**-9).any()),
        outputs=("dx",),
        when="a dy that is small throughout",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
