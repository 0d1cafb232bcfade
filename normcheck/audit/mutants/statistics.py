"""Faults in mean, variance and rstd: masks, tails, eps, cancellation, sums in too little precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import (
    CLEAN,
    HALF,
    LAYERNORMS,
    RMSNORMS,
    Kernel,
    KernelCall,
    chain_in,
    mean_in_io,
    rounded,
)
from normcheck.audit.mutants.mutant import RSTD, STATS, WITHIN_ADDITIONS, Mutant, implementations, mutant


def _first(columns: Callable[[int], int]) -> Kernel:
    """A kernel that takes its statistics from the first ``columns(N)`` columns only."""
    return Kernel(
        mean=lambda c: c.sum_n(c.x[:, : columns(c.N)]) / c.N,
        variance=lambda c: c.sum_n((c.xc * c.xc)[:, : columns(c.N)]) / c.N,
    )


def _fp16_squares(c: KernelCall) -> Tensor:
    squares = rounded(rounded(c.xc, torch.float16) ** 2, torch.float16)
    return chain_in(squares.t(), torch.float16)[:, None] / c.N


def _fp16_number(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float16))


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="mF01",
        what="each masked lane of the padded row adds (0 - mean)**2 to the variance",
        source="linkedin/Liger-Kernel#518",
        kernel=Kernel(variance=lambda c: (c.sum_n(c.xc * c.xc) + (c.block - c.N) * c.m * c.m) / c.N),
        ops=LAYERNORMS,
        outputs=RSTD,
        when="N is not a power of two and mean != 0",
    ),
    mutant(
        id="mF02",
        what="the sums of the statistics are divided by BLOCK, the padded row, instead of N",
        source="invented",
        kernel=Kernel(mean=lambda c: c.sum_n(c.x) / c.block, variance=lambda c: c.sum_n(c.xc * c.xc) / c.block),
        outputs=STATS,
        when="N is not a power of two",
    ),
    mutant(
        id="mF03",
        what="the variance is divided by N - 1 (by 1 where N is 1, so that no NaN gives it away)",
        source="invented",
        kernel=Kernel(variance=lambda c: c.sum_n(c.xc * c.xc) / max(c.N - 1, 1)),
        ops=LAYERNORMS,
        outputs=RSTD,
        widest=WITHIN_ADDITIONS,
    ),
    mutant(
        id="mF04",
        what="the variance is E[x*x] - mean*mean in fp32, negative values raised to 0",
        source="tracel-ai/burn#5607",
        kernel=Kernel(variance=lambda c: (c.mean_n(c.x * c.x) - c.m * c.m).clamp(min=0)),
        ops=LAYERNORMS,
        outputs=RSTD,
        when="|mean| well above sigma",
    ),
    mutant(
        id="mF05",
        what="the variance is E[x*x] - mean*mean in fp32, even where that is negative",
        source="microsoft/onnxruntime#28463",
        kernel=Kernel(variance=lambda c: c.mean_n(c.x * c.x) - c.m * c.m),
        ops=LAYERNORMS,
        outputs=RSTD,
        when="|mean| well above sigma",
    ),
    mutant(
        id="mF06",
        what="1 / sqrt(v), without eps",
        source="VeriSilicon/TIM-VX#589",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v)),
        outputs=RSTD,
    ),
    mutant(
        id="mF07",
        what="1 / (sqrt(v) + eps)",
        source="tracel-ai/burn#2185",
        kernel=Kernel(rstd=lambda c: 1 / (torch.sqrt(c.v) + c.eps)),
        outputs=RSTD,
    ),
    mutant(
        id="mF08",
        what="eps is added to N instead of the variance",
        source="xlite-dev/LeetCUDA#309",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v * c.N / (c.N + c.eps))),
        outputs=RSTD,
    ),
    mutant(
        id="mF09",
        what="eps is 1e-5 whatever the caller says",
        source="paiml/aprender#1606",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + 1e-5)),
        outputs=RSTD,
        when="eps is not 1e-5",
    ),
    mutant(
        id="mF10",
        what="eps is rounded to fp16",
        source="deepspeedai/DeepSpeed#581",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + _fp16_number(c.eps))),
        outputs=RSTD,
        when="the variance is not far above eps",
    ),
    mutant(
        id="mF11",
        what="eps is added twice",
        source="invented",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(c.v + c.eps + c.eps)),
        outputs=RSTD,
    ),
    mutant(
        id="mF12",
        what="the sums over a row are accumulated in the io dtype",
        source="Xilinx/mlir-aie#3410",
        kernel=Kernel(mean=lambda c: mean_in_io(c, c.x), variance=lambda c: mean_in_io(c, c.xc * c.xc)),
        dtypes=HALF,
        outputs=STATS,
    ),
    mutant(
        id="mF13",
        what="the squares and their sum are in fp16",
        source="microsoft/onnxruntime#29034",
        kernel=Kernel(variance=_fp16_squares),
        outputs=RSTD,
    ),
    mutant(
        id="mF14",
        what="the last column is left out of the statistics",
        source="invented",
        kernel=Kernel(
            mean=lambda c: c.sum_n(c.x[:, :-1]) / c.N, variance=lambda c: c.sum_n((c.xc * c.xc)[:, :-1]) / c.N
        ),
        outputs=STATS,
    ),
    mutant(
        id="mF15",
        what="the last N mod 8 columns are left out of the statistics",
        source="tile-ai/tilelang-ascend#890",
        kernel=_first(lambda n: n // 8 * 8),
        outputs=STATS,
        when="N is not a multiple of 8",
    ),
    mutant(
        id="mF16",
        what="rstd is saved rounded to the io dtype, y uses the exact one",
        source="pytorch/helion#2273",
        kernel=Kernel(rstd_out=lambda c: rounded(c.r, c.io)),
        dtypes=HALF,
        outputs=("rstd", "y", "dx", "dw"),
    ),
    mutant(
        id="mF17",
        what="mean is saved rounded to the io dtype, y uses the exact one",
        source="invented",
        kernel=Kernel(mean_out=lambda c: rounded(c.m, c.io)),
        ops=LAYERNORMS,
        dtypes=HALF,
        outputs=("mean", "y", "dx", "dw"),
    ),
    mutant(
        id="mF18",
        what="RMSNorm subtracts the mean in its mean square",
        source="invented",
        kernel=Kernel(variance=lambda c: c.mean_n((c.x - c.mean_n(c.x)) ** 2)),
        ops=RMSNORMS,
        outputs=RSTD,
        when="mean != 0",
    ),
    mutant(
        id="mF19",
        what="LayerNorm does not subtract the mean",
        source="invented",
        kernel=Kernel(mean=lambda c: c.zeros),
        ops=LAYERNORMS,
        outputs=STATS,
    ),
    mutant(
        id="mF20",
        what="the variance is saved in the place of rstd",
        source="flagos-ai/FlagGems#5771",
        kernel=Kernel(rstd_out=lambda c: c.v),
        outputs=("rstd", "y", "dx", "dw"),
    ),
    mutant(
        id="mF21",
        what="rstd comes from an approximation that is off by 2**-11",
        source="invented",
        kernel=Kernel(rstd=lambda c: CLEAN.rstd(c) * (1 + 2**-11)),
        outputs=RSTD,
    ),
    mutant(
        id="mF22",
        what="v + eps is rounded to the io dtype before the root",
        source="deepspeedai/DeepSpeed#581",
        kernel=Kernel(rstd=lambda c: 1 / torch.sqrt(rounded(c.v + c.eps, c.io))),
        dtypes=HALF,
        outputs=RSTD,
    ),
    mutant(
        id="mF23",
        what="rstd is rounded to the io dtype, used and saved so",
        source="amd/IRON#139",
        kernel=Kernel(rstd=lambda c: rounded(CLEAN.rstd(c), c.io)),
        dtypes=HALF,
        outputs=RSTD,
    ),
    mutant(
        id="mF24",
        what="a last warp of fewer than 32 lanes, 4 columns each, is dropped from the statistics",
        source="ggml-org/llama.cpp#26708",
        kernel=_first(lambda n: n // 128 * 128 or n),
        outputs=STATS,
        when="N > 128 is not a multiple of 128",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
