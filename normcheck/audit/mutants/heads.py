"""Faults of kernels that norm heads, x (T, H, N), as q is a view of a fused projection to q, k and v; and right ones.

Where x is (M, N) each of them is the clean kernel. As (T, H, N) it has a stride for tokens and one for heads, and the
heads of k and v lie behind those of q.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import CLEAN, Kernel, KernelCall
from normcheck.audit.mutants.mutant import READ_BEYOND, STATS, UNWRITTEN, Mutant, implementations, mutant
from normcheck.impls.implementation import Implementation

_OPS = ("layernorm", "rmsnorm")


def _with_strides(strides: Callable[[Tensor], tuple[int, int]]) -> Kernel:
    """The clean kernel that reads x with these strides of tokens and heads."""

    def load(t: Tensor, name: str) -> Tensor:
        if name != "x" or t.dim() == 2:
            return t
        return t.as_strided(t.shape, (*strides(t), 1), t.storage_offset())

    return Kernel(load=load)


def _viewed(t: Tensor, name: str) -> Tensor:
    return t.view(-1, t.shape[-1]) if name == "x" else t


def _rows_by_stride_of_tokens(t: Tensor, name: str) -> Tensor:
    """Row r of x at r * x.stride(0). What would lie behind x is read as its last row."""
    if name != "x" or t.dim() == 2 or not t.numel():
        return t
    (tokens, heads, n), (token, head, _) = t.shape, t.stride()
    last = (tokens - 1) * token + (heads - 1) * head
    first = (torch.arange(tokens * heads, device=t.device) * token).clamp(max=last)
    flat = t.as_strided((last + n,), (1,), t.storage_offset())
    return flat[first[:, None] + torch.arange(n, device=t.device)].view(t.shape)


def _without_last_heads(wanted: Callable[[int], int]) -> Kernel:
    """The clean kernel that stores y for so many heads of each token; the others stay as torch.empty made them."""

    def finish(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
        if "y" in out and c.x_io.dim() == 3:
            y = torch.empty_like(out["y"])
            kept = wanted(y.shape[1])
            y[:, :kept] = out["y"][:, :kept]
            out["y"] = y
        return out

    return Kernel(finish=finish)


def _in_place(others: Callable[[Tensor], int], c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    """y in the memory of x, if x has heads; ``others``: how many heads behind those of x are normed as well."""
    x = c.x_io
    if "y" not in out or x.dim() == 2:
        return out
    x.copy_(out["y"])
    if x.numel() and (count := others(x)):
        behind = x.as_strided((x.shape[0], count, c.N), x.stride(), int(x.storage_offset()) + x.shape[1] * x.stride(1))
        behind.copy_(CLEAN.forward(c.op, behind, c.w_io, c.b_io, c.eps)["y"])
    return {**out, "y": x}


def _heads_behind(x: Tensor) -> int:
    """The heads that lie behind those of x, if the stride of tokens is taken for what there is."""
    return x.stride(0) // x.stride(1) - x.shape[1]


def _as_x_lies(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    """y and dx as views of buffers that have room for other heads, y with its heads first."""
    if c.x_io.dim() == 3 and c.M:
        if "y" in out:
            out["y"] = out["y"].transpose(0, 1).contiguous().transpose(0, 1)
        if "dx" in out:
            tokens, heads, n = out["dx"].shape
            room = torch.empty(tokens, heads + 2, n, dtype=c.io, device=c.x_io.device)
            room[:, :heads] = out["dx"]
            out["dx"] = room[:, :heads]
    return out


_planted = partial(mutant, heads=True, ops=_OPS)
"""A fault of heads, see ``mutant``."""

MUTANTS: tuple[Mutant, ...] = (
    _planted(
        id="H01",
        what="gaps between heads are ignored: head h of a token is read at h * N",
        source="invented",
        kernel=_with_strides(lambda x: (x.stride(0), x.shape[2])),
        outputs=STATS,
        kinds=READ_BEYOND,
        when="heads with gaps",
    ),
    _planted(
        id="H02",
        what="the heads of k and v are ignored: tokens are read as if only those of q were there",
        source="vllm-project/vllm#17735",
        kernel=_with_strides(lambda x: (x.shape[1] * x.stride(1), x.stride(1))),
        outputs=STATS,
        kinds=READ_BEYOND,
        when="several tokens of heads",
    ),
    _planted(
        id="H03",
        what="the first head of k is normed in place with those of q",
        source="invented",
        kernel=Kernel(finish=partial(_in_place, lambda x: 1)),
        overwrites=("x",),
        outputs=("x",),
        kinds=("out_of_bounds_write",),
        when="heads",
    ),
    _planted(
        id="H04",
        what="y is not written for the last head of each token",
        source="invented",
        kernel=_without_last_heads(lambda heads: heads - 1),
        outputs=("y",),
        kinds=UNWRITTEN,
        when="heads",
    ),
    _planted(
        id="H05",
        what="if a token has one head, the stride of that dimension is taken for that of the rows",
        source="invented",
        kernel=_with_strides(lambda x: (x.stride(1), x.stride(1)) if x.shape[1] == 1 else (x.stride(0), x.stride(1))),
        outputs=STATS,
        kinds=READ_BEYOND,
        when="several tokens of one head",
    ),
    _planted(
        id="H06",
        what="x is viewed as (-1, N), which heads of a fused projection cannot be",
        source="sgl-project/sgl-kernel-xpu#169",
        kernel=Kernel(load=_viewed),
        outputs=("",),
        kinds=("exception",),
        when="several tokens of heads",
    ),
    _planted(
        id="H07",
        what="rows are taken to lie x.stride(0) apart, whatever the rank of x",
        source="vllm-project/vllm-xpu-kernels#396",
        kernel=Kernel(load=_rows_by_stride_of_tokens),
        outputs=STATS,
        kinds=READ_BEYOND,
        when="several tokens of several heads",
    ),
    _planted(
        id="H08",
        what="the heads of a token are counted as x.stride(0) / x.stride(1), so that k and v are normed in place too",
        source="invented",
        kernel=Kernel(finish=partial(_in_place, _heads_behind)),
        overwrites=("x",),
        outputs=("x",),
        kinds=("out_of_bounds_write",),
        when="heads",
    ),
    _planted(
        id="H09",
        what="heads are taken four at a time, and y is not written for a rest",
        source="invented",
        kernel=_without_last_heads(lambda heads: heads // 4 * 4),
        outputs=("y",),
        kinds=UNWRITTEN,
        when="a number of heads that is no multiple of 4",
    ),
)

CONTROLS: tuple[Implementation, ...] = (
    *(
        Kernel(finish=partial(_in_place, lambda x: 0)).implementation(
            "heads_in_place", op, heads=True, overwrites=("x",)
        )
        for op in _OPS
    ),
    *(Kernel(finish=_as_x_lies).implementation("heads_as_views", op, heads=True, ranks=(2, 3)) for op in _OPS),
)

IMPLEMENTATIONS = (*implementations(MUTANTS), *CONTROLS)
