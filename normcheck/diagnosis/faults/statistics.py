"""Faults of eps, mean, variance and rstd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.dtypes import Format
from normcheck.diagnosis.faults.fault import (
    BF16,
    FP16,
    Fault,
    by_tile,
    centered_ops,
    chain_n,
    fault,
    raw_ops,
    sum_n,
    whole_blocks,
)
from normcheck.diagnosis.formula import TEXTBOOK, Call, through


def _eps(name: str, words: str, eps: Callable[[Call], float]) -> Fault:
    return fault(name, words, eps=eps)


def _always(value: float) -> Callable[[Call], float]:
    return lambda c: value


def _in_fp16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float16))


_CONSTANTS = (1e-3, 1e-5, 1e-6, 1e-8, 1e-12)


def _named(value: float) -> str:
    return f"eps_{value:g}".replace("-0", "-")


_EPS = (
    fault(
        "eps_outside",
        "eps is added outside the root: 1 / (sqrt(v) + eps)",
        eps=lambda c: 0.0,
        rstd=lambda c: 1 / (c.v.sqrt() + c.eps),
    ),
    fault(
        "eps_after_root",
        "eps is added to the reciprocal of the root: 1 / sqrt(v) + eps",
        eps=lambda c: 0.0,
        rstd=lambda c: c.v.rsqrt() + c.eps,
    ),
    fault(
        "eps_inside_and_outside",
        "eps is added inside the root and outside it",
        rstd=lambda c: 1 / ((c.v + c.eps).sqrt() + c.eps),
    ),
    _eps("eps_twice", "eps is added twice", lambda c: 2 * c.eps),
    _eps("eps_missing", "eps is left out: 1 / sqrt(v)", lambda c: 0.0),
    _eps("eps_fp16", "eps is rounded to fp16", lambda c: _in_fp16(c.eps)),
    _eps("eps_tenth", "a tenth of eps is used", lambda c: c.eps / 10),
    _eps("eps_tenfold", "ten times eps is used", lambda c: c.eps * 10),
    _eps("eps_squared", "eps * eps is added to the variance", lambda c: c.eps * c.eps),
    _eps(
        "eps_over_n",
        "eps is added to the sum of squares: it must be added after the division by N",
        lambda c: c.eps / c.N,
    ),
    _eps("eps_times_n", "eps is added N times: once for each square of the sum", lambda c: c.eps * c.N),
    _eps("eps_root", "the root of eps is added to the variance", lambda c: c.eps**0.5),
    fault(
        "eps_to_n",
        "eps is added to N: sum / (N + eps)",
        eps=lambda c: 0.0,
        rstd=lambda c: (c.v * (c.N / (c.N + c.eps))).rsqrt(),
    ),
    *(_eps(_named(value), f"eps is {value:g} whatever the caller says", _always(value)) for value in _CONSTANTS),
)

ALWAYS = frozenset(map(_named, _CONSTANTS))
"""The names of an eps that is always the same."""


def stale_eps(eps: float) -> Fault:
    """An ``eps`` that is not the caller's, but that of an earlier call."""
    return _eps("eps_stale", f"eps is {eps:g}, that of an earlier call: this one's is not used", _always(eps))


def _first(columns: Callable[[int], int]) -> dict[str, Any]:
    """Steps of statistics that are taken from the first ``columns(N)`` columns, and divided by N."""
    return {
        "mean": lambda c: sum_n(c.x[:, : columns(c.N)]) / c.N,
        "variance": lambda c: sum_n((c.xc * c.xc)[:, : columns(c.N)]) / c.N,
    }


def _without_tail(k: int) -> Iterator[Fault]:
    words = f"the last N mod {k} columns are left out of the statistics: the tail of a row is not read"
    of_mean = f"the last N mod {k} columns are left out of the mean"
    for columns in (lambda n: n // k * k, lambda n: whole_blocks(n, k)):
        steps = _first(columns)
        yield fault(f"stats_without_tail_{k}", words, **steps)
        yield fault(f"mean_without_tail_{k}", of_mean, mean=steps["mean"], takes=centered_ops)


def _without_last_block(k: int) -> Fault:
    words = f"the last block of up to {k} columns is left out of the statistics"
    return fault(f"stats_without_last_{k}", words, **_first(lambda n: (n - 1) // k * k))


def _first_columns(k: int) -> Fault:
    words = f"columns from {k} on are left out of the statistics: behind a limit, or in a last block that is not full"
    return fault(f"stats_first_{k}_columns", words, **_first(lambda n: min(n, k)))


def _over_rows(k: int) -> Fault:
    """The statistics of rows that share a block."""
    return fault(
        f"stats_over_{k}_rows",
        f"the sums of the statistics are taken over {k} rows at a time: each row has its own",
        mean=lambda c: by_tile(c.x.mean(1, keepdim=True), k),
        variance=lambda c: by_tile((c.xc * c.xc).mean(1, keepdim=True), k),
    )


def _rounded_statistics(name: str, of: str, fmt: Callable[[Call], Format], narrow: bool) -> Iterator[Fault]:
    """rstd, mean or both rounded, where they are used or where they are saved."""
    rounds: dict[str, Any] = {"narrow": narrow, "but": "" if narrow else name}

    def mean(c: Call) -> Tensor:
        return through(TEXTBOOK.mean(c), fmt(c))

    def rstd(c: Call) -> Tensor:
        return through(TEXTBOOK.rstd(c), fmt(c))

    yield fault(f"rstd_{name}", f"rstd is rounded to {of}, used and saved so", rstd=rstd, **rounds)
    yield fault(
        f"stats_{name}", f"mean and rstd are rounded to {of}", mean=mean, rstd=rstd, takes=centered_ops, **rounds
    )

    def kept(*names: str) -> Callable[[Call, Tensor, str], Tensor]:
        return lambda c, t, name: through(t, fmt(c)) if name in names else t

    yield fault(
        f"rstd_{name}_saved", f"rstd is saved rounded to {of}: y uses the exact one", keep=kept("rstd"), **rounds
    )
    yield fault(
        f"mean_{name}_saved",
        f"mean is saved rounded to {of}: y uses the exact one",
        keep=kept("mean"),
        takes=centered_ops,
        **rounds,
    )
    yield fault(
        f"stats_{name}_saved",
        f"mean and rstd are saved rounded to {of}: y uses the exact ones",
        keep=kept("mean", "rstd"),
        takes=centered_ops,
        **rounds,
    )


def _mean_chain(c: Call) -> Tensor:
    return (chain_n(c.x, c.io).float() / c.N).double()


def _squares(c: Call) -> Tensor:
    """(x - mean)^2 in fp32."""
    centered = c.x.float() - c.m.float() if c.op.centered else c.x.float()
    return centered * centered


FAULTS = (
    *_EPS,
    fault(
        "n_minus_1",
        "the variance is divided by N - 1: it must be N",
        variance=lambda c: sum_n(c.xc * c.xc) / max(c.N - 1, 1),
    ),
    fault(
        "n_minus_1",
        "the variance is divided by N - 1: it must be N",
        variance=lambda c: sum_n(c.xc * c.xc) / (c.N - 1),  # of one column: inf, or NaN if it is centred
    ),
    fault(
        "not_divided",
        "the sum of squares is not divided by N",
        variance=lambda c: sum_n(c.xc * c.xc),
    ),
    fault(
        "padded_divisor",
        "the sums of the statistics are divided by the padded row, a power of two: they must be divided by N",
        mean=lambda c: sum_n(c.x) / c.block,
        variance=lambda c: sum_n(c.xc * c.xc) / c.block,
    ),
    fault(
        "padded_variance",
        "the variance is divided by the padded row, a power of two: it must be divided by N",
        variance=lambda c: sum_n(c.xc * c.xc) / c.block,
        takes=centered_ops,
    ),
    fault(
        "tail_not_masked",
        "the tail of the padded row is not masked: each padded lane adds (0 - mean)^2 to the variance",
        variance=lambda c: (sum_n(c.xc * c.xc) + (c.block - c.N) * c.m * c.m) / c.N,
        takes=centered_ops,
    ),
    fault(
        "variance_one_pass",
        "the variance is mean(x^2) - mean^2, which cancels on rows far from zero",
        one_pass=True,
        takes=centered_ops,
    ),
    fault(
        "mean_missing",
        "the mean is not subtracted",
        mean=lambda c: c.zeros,
        takes=centered_ops,
        facts={"centered": False},
    ),
    fault(
        "mean_missing_in_variance",
        "the variance is mean(x^2): the mean must be subtracted first",
        variance=lambda c: (c.x * c.x).mean(1, keepdim=True),
        takes=centered_ops,
    ),
    fault(
        "mean_missing_in_xhat",
        "xhat is x * rstd: the mean must be subtracted first",
        xhat=lambda c: c.x * c.r,
        takes=centered_ops,
    ),
    fault(
        "mean_subtracted",
        "the mean is subtracted in the mean square, which RMSNorm does not do",
        variance=lambda c: ((c.x - TEXTBOOK.mean(c)) ** 2).mean(1, keepdim=True),
        takes=raw_ops,
    ),
    fault(
        "layernorm_for_rmsnorm",
        "the mean is subtracted, which RMSNorm does not do",
        center=lambda c: c.x - TEXTBOOK.mean(c),
        takes=raw_ops,
        facts={"centered": True},
    ),
    fault(
        "last_column_left_out",
        "the last column is left out of the statistics",
        **_first(lambda n: n - 1),
    ),
    *(each for k in (2, 4, 8, 16, 32, 64, 128, 256) for each in _without_tail(k)),
    *map(_first_columns, (1024, 2048, 4096, 8192, 16384, 32768, 65536)),
    *map(_over_rows, (2, 4, 8)),
    fault(
        "rstd_of_first_row",
        "every row takes rstd of the first one",
        rstd=lambda c: TEXTBOOK.rstd(c)[:1].expand(c.M, 1),
    ),
    *map(_without_last_block, (4, 8, 16, 32, 64, 128, 256)),
    *_rounded_statistics("io", "the io dtype", lambda c: c.io, narrow=True),
    *_rounded_statistics("bf16", "bf16", lambda c: BF16, narrow=False),
    *_rounded_statistics("fp16", "fp16", lambda c: FP16, narrow=False),
    fault(
        "variance_io",
        "v + eps is rounded to the io dtype before the root",
        rstd=lambda c: 1 / through(c.v + c.eps, c.io).sqrt(),
        narrow=True,
    ),
    fault(
        "stats_accumulated_io",
        "the sums of the statistics are accumulated in the io dtype",
        mean=_mean_chain,
        variance=lambda c: chain_n(_squares(c), c.io) / c.N,
        narrow=True,
    ),
    fault(
        "squares_fp16",
        "the squares and their sum are in fp16",
        variance=lambda c: chain_n(through(through(c.x.float() - c.m.float(), FP16) ** 2, FP16), FP16) / c.N,
    ),
    fault("variance_for_rstd", "the variance is saved in the place of rstd", rstd_out=lambda c: c.v),
    fault("std_for_rstd", "the standard deviation is saved in the place of rstd", rstd_out=lambda c: 1 / c.r),
    fault("rstd_squared", "rstd has the wrong power: xhat is (x - mean) / (v + eps)", rstd=lambda c: 1 / (c.v + c.eps)),
    fault(
        "rstd_inverted", "rstd has the wrong power: x is multiplied by the root", rstd=lambda c: (c.v + c.eps).sqrt()
    ),
    fault("rstd_missing", "rstd is missing in y: xhat is x - mean", xhat=lambda c: c.xc),
    fault("rstd_2_11", "rstd is too large by 2^-11 of itself", rstd=lambda c: TEXTBOOK.rstd(c) * (1 + 2.0**-11)),
    fault("rstd_1e-5", "rstd is too large by 1e-5 of itself", rstd=lambda c: TEXTBOOK.rstd(c) * (1 + 1e-5)),
)
