"""Correct kernels and faults of the ops that are rmsnorm with another casting, that of Llama and that of Gemma."""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import BOTH, GEMMA, HALF, LLAMA, Kernel, rounded, truncated
from normcheck.audit.mutants.mutant import RSTD, Mutant, implementations, mutant
from normcheck.impls.implementation import Implementation

# --- Correct kernels.

IN_IO = Kernel(
    reduce_n=sequential,
    reduce_m=sequential,
    rstd=lambda c: torch.rsqrt(c.v + c.eps),
    preact=lambda c: (c.xh.to(c.io) * (1 if c.w_io is None else c.w_io)).float(),
    wdy=lambda c: rounded(c.dy * c.g, c.io),
    dw=lambda c: c.sum_m(rounded(c.dy * c.cast(c.xh), c.io)),
)
"""rmsnorm_llama with every product of two tensors of the io dtype rounded to it, as in Liger's kernel."""

IN_FP32 = Kernel(reduce_n=pairwise, reduce_m=pairwise, xhat=lambda c: c.cast(c.xc / torch.sqrt(c.v + c.eps)))
"""The kernel that rounds no more than the op requires, with xhat by a division."""


def rmsnorm_llama(x: Tensor, weight: Tensor | None, bias: None, eps: float) -> Tensor:
    """LlamaRMSNorm op by op, x (M, N). Its gradients by autograd are rounded in the io dtype at each op."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h if weight is None else weight * h.to(x.dtype)).to(x.dtype)


def rmsnorm_gemma(x: Tensor, weight: Tensor | None, bias: None, eps: float) -> Tensor:
    """GemmaRMSNorm op by op, x (M, N)."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h if weight is None else h * (1.0 + weight.float())).to(x.dtype)


CONTROLS: tuple[Implementation, ...] = (
    *(IN_IO.implementation("casting_in_io", op, weights=BOTH) for op in LLAMA),
    *(IN_FP32.implementation("casting_in_fp32", op, weights=BOTH) for op in (*LLAMA, *GEMMA)),
    *(Implementation(name="casting_autograd", op=op, forward=rmsnorm_llama, weights=BOTH) for op in LLAMA),
    *(Implementation(name="casting_autograd", op=op, forward=rmsnorm_gemma, weights=BOTH) for op in GEMMA),
)
"""Every correct kernel of these ops."""

# --- Faults. Those in the rounding of xhat have no effect if the io dtype is fp32.

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="llama-unrounded",
        what="xhat is not rounded before it is multiplied by the weight: fp32 throughout",
        source="invented",
        kernel=Kernel(xhat=lambda c: c.xc * c.r),
        ops=LLAMA,
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="llama-truncated",
        what="xhat is rounded toward zero",
        source="invented",
        kernel=Kernel(xhat=lambda c: truncated(c.xc * c.r, c.io).float()),
        ops=LLAMA,
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="llama-rstd-rounded",
        what="rstd is rounded to the io dtype, and xhat is multiplied in it",
        source="invented",
        kernel=Kernel(xhat=lambda c: rounded(c.xc * rounded(c.r, c.io), c.io)),
        ops=LLAMA,
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="llama-weight-rounded",
        what="an fp32 weight is rounded to the io dtype",
        source="invented",
        kernel=Kernel(gamma=lambda c: rounded(c.w, c.io)),
        ops=LLAMA,
        dtypes=HALF,
        outputs=("y",),
        when="weight_dtype=fp32",
    ),
    mutant(
        id="llama-dw-unrounded",
        what="dw is summed from xhat as it was before its rounding",
        source="invented",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy * c.xh)),
        ops=LLAMA,
        dtypes=HALF,
        outputs=("dw",),
    ),
    mutant(
        id="casting-eps-outside",
        what="1 / (sqrt(mean(x^2)) + eps)",
        source="invented",
        kernel=Kernel(rstd=lambda c: 1 / (torch.sqrt(c.v) + c.eps)),
        ops=(*LLAMA, *GEMMA),
        outputs=RSTD,
        when="an eps that is not small beside the rows, and statistics or a y that is not rounded over it",
    ),
    mutant(
        id="gemma-weight",
        what="the scale is the weight instead of 1 + weight in forward",
        source="linkedin/Liger-Kernel#74",
        kernel=Kernel(gamma=lambda c: c.w),
        ops=GEMMA,
        outputs=("y",),
    ),
    mutant(
        id="gemma-weight-b",
        what="the scale is the weight instead of 1 + weight in backward",
        source="invented",
        kernel=Kernel(gamma_b=lambda c: c.w),
        ops=GEMMA,
        outputs=("dx",),
    ),
    mutant(
        id="gemma-scale-rounded",
        what="1 + weight is rounded to the io dtype in forward",
        source="linkedin/Liger-Kernel#1462",
        kernel=Kernel(gamma=lambda c: rounded(1 + c.w, c.io)),
        ops=GEMMA,
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="gemma-scale-rounded-b",
        what="1 + weight is rounded to the io dtype in backward",
        source="invented",
        kernel=Kernel(gamma_b=lambda c: rounded(1 + c.w, c.io)),
        ops=GEMMA,
        dtypes=HALF,
        outputs=("dx",),
    ),
    mutant(
        id="gemma-xhat-rounded",
        what="xhat is rounded to the io dtype before it is multiplied by 1 + weight, as Llama does",
        source="invented",
        kernel=Kernel(xhat=lambda c: rounded(c.xc * c.r, c.io)),
        ops=GEMMA,
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="gemma-dw-rounded",
        what="dw is summed from xhat rounded to the io dtype, as Llama does",
        source="invented",
        kernel=Kernel(dw=lambda c: c.sum_m(c.dy * rounded(c.xh, c.io))),
        ops=GEMMA,
        dtypes=HALF,
        outputs=("dw",),
    ),
)

IMPLEMENTATIONS = (*implementations(MUTANTS), *CONTROLS)
