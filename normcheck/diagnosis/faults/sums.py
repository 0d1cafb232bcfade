"""Faults of dw and db, which are sums over the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.diagnosis.faults.fault import (
    BF16,
    FP16,
    Fault,
    biased_ops,
    centered_ops,
    chain,
    fault,
    not_rounding_ops,
    rounding_ops,
    storing,
    zero_centered_ops,
)
from normcheck.diagnosis.formula import TEXTBOOK, Call, Step, stored, through


def _over(choose: Callable[[int], Tensor]) -> Callable[[Call, Tensor], Tensor]:
    """A sum over the rows with these numbers, of M."""
    return lambda c, t: t[choose(len(t))].sum(0)


def _padded(m: int, height: int) -> Tensor:
    return torch.arange(-(-m // height) * height)


def _rows(name: str, words: str, choose: Callable[[int], Tensor]) -> Fault:
    return fault(name, words, sum_m=_over(choose))


def _dw(name: str, words: str, dw: Step, **more: Any) -> Fault:
    return fault(name, words, dw=dw, **more)


def _dw_terms(c: Call) -> Tensor:
    """dy * xhat in fp32."""
    return c.dy.float() * ((c.x.float() - c.m.float()) * c.r.float())


def _without_tail(k: int) -> Fault:
    words = f"the last M mod {k} rows are missed in dw and db"
    return _rows(f"dw_without_tail_{k}", words, lambda m: torch.arange(m // k * k))


def _tail_wraps(k: int) -> Fault:
    words = f"in dw and db a last tile of {k} rows that is not full wraps to the first rows"
    return _rows(f"dw_tail_wraps_{k}", words, lambda m: _padded(m, k) % max(m, 1))


def _tail_repeats(k: int) -> Fault:
    words = f"in dw and db a last tile of {k} rows that is not full repeats the last row"
    return _rows(f"dw_tail_repeats_{k}", words, lambda m: _padded(m, k).clamp(max=m - 1))


def _lost_partial(k: int) -> Fault:
    words = "one of four partial sums of dw and db is lost"
    return _rows(f"dw_lost_partial_{k}_of_4", words, lambda m: torch.arange(m)[torch.arange(m) % 4 != k])


def _first_rows(rows: int) -> Fault:
    words = f"dw and db are summed over the first {rows} rows only: the grid has no loop over the rest"
    return _rows(f"dw_first_{rows}_rows", words, lambda m: torch.arange(min(m, rows)))


def _accumulated(name: str, of: str, fmt: Callable[[Call], Format], **more: Any) -> Fault:
    return fault(
        f"dw_accumulated_{name}",
        f"dw and db are accumulated in {of}, row by row",
        dw=lambda c: chain(_dw_terms(c), fmt(c)),
        db=lambda c: chain(c.dy.float(), fmt(c)),
        **more,
    )


def _tiles_io(height: int) -> Fault:
    def summed(c: Call, t: Tensor) -> Tensor:
        tiles = [tile.sum(0) for tile in torch.split(t.float(), height)]
        return chain(torch.stack(tiles), c.io) if tiles else t.sum(0)

    return fault(
        f"dw_tiles_of_{height}_io",
        f"dw and db are added up in the io dtype from tile to tile of {height} rows",
        dw=lambda c: summed(c, _dw_terms(c)),
        db=lambda c: summed(c, c.dy),
        narrow=True,
    )


def _partials_io(count: int) -> Fault:
    def summed(c: Call, t: Tensor) -> Tensor:
        return torch.stack([through(t[first::count].sum(0), c.io) for first in range(count)]).sum(0)

    return fault(
        f"dw_{count}_partials_io",
        f"dw and db go through {count} partial sums in the io dtype",
        dw=lambda c: summed(c, c.dy * c.of_dw()),
        db=lambda c: summed(c, c.dy),
        narrow=True,
    )


FAULTS = (
    *map(_without_tail, (2, 4, 8, 16, 32, 64, 128)),
    *map(_tail_wraps, (4, 8, 16, 32)),
    *map(_tail_repeats, (4, 8, 16, 32)),
    *map(_lost_partial, range(4)),
    *map(_first_rows, (128, 256, 512, 1024, 1056, 2048, 4096)),
    _rows("dw_first_row_missing", "row 0 is missed in dw and db", lambda m: torch.arange(m)[1:]),
    _rows("dw_last_row_missing", "the last row is missed in dw and db", lambda m: torch.arange(m)[:-1]),
    fault("dw_over_m", "dw and db are divided by M", sum_m=lambda c, t: t.sum(0) / max(len(t), 1)),
    fault("dw_onto_ones", "dw and db are added to what their memory holds: ones", sum_m=lambda c, t: t.sum(0) + 1),
    fault("dw_twice", "dw and db are counted twice", sum_m=lambda c, t: 2 * t.sum(0)),
    _dw("dw_row_0_missing", "row 0 is missed in dw", lambda c: (c.dy * c.of_dw())[1:].sum(0)),
    _dw("dw_only_twice", "dw is counted twice", lambda c: 2 * TEXTBOOK.dw(c)),
    _dw("dw_without_xhat", "dw is sum(dy): xhat is missing", lambda c: c.rows(c.dy)),
    _dw(
        "dw_without_mean",
        "dw takes x * rstd for xhat: the mean must be subtracted",
        lambda c: c.rows(c.dy * c.x * c.r),
        takes=centered_ops,
    ),
    _dw("dw_without_rstd", "dw takes x - mean for xhat: rstd is missing", lambda c: c.rows(c.dy * c.xc)),
    _dw(
        "dw_one_plus",
        "dw has an extra factor (1 + weight) / weight",
        lambda c: TEXTBOOK.dw(c) * (1 + c.w) / c.w,
        takes=zero_centered_ops,
    ),
    _dw("dw_with_weight", "dw has the weight as an extra factor", lambda c: TEXTBOOK.dw(c) * c.one_plus(c.w)),
    _dw(
        "dw_of_rounded_xhat",
        "dw is summed from xhat rounded to the io dtype, which this op does not do",
        lambda c: c.rows(c.dy * through(c.xh, c.io)),
        takes=not_rounding_ops,
        narrow=True,
    ),
    _dw(
        "dw_of_unrounded_xhat",
        "dw is summed from xhat as it was before its rounding",
        lambda c: c.rows(c.dy * c.xh),
        takes=rounding_ops,
        narrow=True,
    ),
    fault(
        "dw_db_exchanged",
        "dw and db are exchanged",
        dw=lambda c: c.rows(c.dy),
        db=lambda c: c.rows(c.dy * c.of_dw()),
        takes=biased_ops,
    ),
    fault("db_of_xhat", "db is sum(dy * xhat), as dw", db=lambda c: c.rows(c.dy * c.of_dw()), takes=biased_ops),
    fault("db_missing", "db is zeros", db=lambda c: 0 * c.rows(c.dy), takes=biased_ops),
    fault("db_with_weight", "db has the weight as an extra factor", db=lambda c: c.rows(c.wd), takes=biased_ops),
    _dw("dw_missing", "dw is zeros", lambda c: 0 * c.rows(c.dy)),
    fault("db_of_dx", "db is sum(dx): dy was overwritten by dx", db=lambda c: c.rows(TEXTBOOK.dx(c)), takes=biased_ops),
    fault(
        "dw_bf16",
        "dw and db are rounded to bf16 on the way to their dtype",
        store=storing("dw db", lambda t, fmt: stored(stored(t, BF16), fmt)),
        but="bf16",
    ),
    fault(
        "dw_fp16",
        "dw and db are rounded to fp16 on the way to their dtype",
        store=storing("dw db", lambda t, fmt: stored(stored(t, FP16), fmt)),
        but="fp16",
    ),
    fault(
        "dw_io",
        "dw and db are rounded to the io dtype on the way to their own",
        store=lambda c, t, fmt, name: stored(stored(t, c.io), fmt) if name in ("dw", "db") else stored(t, fmt),
        narrow=True,
    ),
    _accumulated("io", "the io dtype", lambda c: c.io, narrow=True),
    _accumulated("bf16", "bf16", lambda c: BF16, but="bf16"),
    _accumulated("fp16", "fp16", lambda c: FP16, but="fp16"),
    *(_tiles_io(k) for k in (4, 8, 16, 32)),
    *(_partials_io(k) for k in (2, 4, 8, 16)),
)
