"""Faults of structure: buffers, aliasing, state, alignment, types. ``triton_grid.py`` has those of real Triton kernels.

X10 is here in torch; ``triton_grid.py`` has the faulty Triton kernel as X10.triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import CLEAN, HALF, LAYERNORMS, TILE, Kernel, KernelCall, only
from normcheck.audit.mutants.mutant import (
    READ_BEYOND,
    RSTD,
    STATS,
    UNWRITTEN,
    VALUES,
    Mutant,
    implementations,
    mutant,
    not_exercised,
)

_VECTOR = 16  # bytes of a vector load


def _a_group_too_many(t: Tensor) -> Tensor:
    """(M, N) -> (N,): the sum of a buffer that has a row for each tile and one more, which is never written."""
    tiles = torch.split(t, TILE)
    partials = torch.empty(len(tiles) + 1, t.shape[1], dtype=t.dtype, device=t.device)
    for group, tile in enumerate(tiles):
        partials[group] = tile.sum(0)
    return partials.sum(0)


def _strides_of_dy(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    # A dx with row stride 0 stores all its rows to one place, which keeps the last one.
    if c.dy_io is not None and c.M > 1 and c.dy_io.stride(0) == 0:
        out["dx"] = out["dx"][-1].expand_as(out["dx"])
    return out


def _from_aligned_address(t: Tensor, name: str) -> Tensor:
    """x as an unchecked vector load reads it: the low bits of the address are lost."""
    beyond = min(t.data_ptr() % _VECTOR // t.element_size(), t.storage_offset())
    return t.as_strided(t.shape, t.stride(), t.storage_offset() - beyond) if name == "x" else t


def _dx_into_dy(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
    if c.dy_io is not None and 0 not in c.dy_io.stride():  # torch refuses to write to rows that share memory
        out["dx"] = c.dy_io.copy_(out["dx"])
    return out


def _in_place(c: KernelCall) -> Tensor:
    # `x.float().sub_(mean)` changes a copy in the half dtypes, but x itself in fp32.
    return c.x_io.view(-1, c.N).sub_(c.m) if c.io == torch.float32 else c.x - c.m


def _bits_as_bf16(c: KernelCall) -> Tensor:
    if c.w_io is None or c.w_io.dtype != torch.float32 or c.io == torch.float32:
        return c.one_plus(c.w)
    return c.one_plus(c.w_io.contiguous().view(torch.bfloat16)[: c.N].float())


def _tail_skipped_without_bias(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    t = t.to(dtype)
    return only(t, ..., slice(c.N // 8 * 8)) if name == "y" and c.b is None else t


def _autotuned() -> Kernel:
    seen: set[tuple[int, int, torch.dtype]] = set()

    def finish(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
        key = (c.M, c.N, c.io)
        if "dw" in out and key not in seen:
            seen.add(key)
            out["dw"] = out["dw"] + out["dw"]
        return out

    return Kernel(finish=finish)


def _cached() -> Kernel:
    cache: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}

    def finish(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
        if "y" in out:
            out["y"] = cache.setdefault((c.x_io.data_ptr(), tuple(c.x_io.shape), c.io), out["y"]).clone()
        return out

    return Kernel(finish=finish)


def _wrong_after_ten() -> Kernel:
    calls = 0

    def finish(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal calls
        if "y" in out:
            calls += 1
            if calls > 10:
                out["y"][..., :1] += 1
        return out

    return Kernel(finish=finish)


def _looks_normal(c: KernelCall) -> Tensor:
    """bool (M, 1): whether a row seems to be normalised already."""
    return (CLEAN.mean(c).abs() < 0.1) & ((c.x.var(1, unbiased=False, keepdim=True) - 1).abs() < 0.1)


MUTANTS: tuple[Mutant, ...] = (
    not_exercised(
        "X02",
        what="no barrier between a read of shared memory and its next use",
        source="flashinfer-ai/flashinfer#3607",
        outputs=("y", "rstd"),
        why="shared memory of CUDA C++: Triton places such barriers itself",
    ),
    not_exercised(
        "X03",
        what="no barrier between the rows that one program takes",
        source="sonots/cumo#423",
        outputs=("y", "rstd"),
        why="shared memory of CUDA C++: Triton places such barriers itself",
    ),
    not_exercised(
        "X06",
        what="more shared memory or registers are asked for than there are, and the launch error is not looked at",
        source="PaddlePaddle/Paddle#78782",
        outputs=("dw", "db"),
        why="needs a launch without an error check, which neither torch nor Triton has",
    ),
    mutant(
        id="X07",
        what="the buffer of partial sums is torch.empty with a row more than is written, all of it summed",
        source="flagos-ai/FlagGems#1082",
        kernel=Kernel(reduce_m=_a_group_too_many),
        outputs=("dw", "db"),
        kinds=UNWRITTEN,
    ),
    not_exercised(
        "X09",
        what="dx is also stored for rows that another program owns, with the same values",
        source="fla-org/flash-linear-attention#1249",
        outputs=("dx",),
        why="the values agree: only a count of the writes would show it",
    ),
    mutant(
        id="X10",
        what="dx has the strides of dy, so that its rows share memory where those of dy do",
        source="unslothai/unsloth#10617",
        kernel=Kernel(finish=_strides_of_dy),
        outputs=("dx",),
        when="dy is expanded",
    ),
    not_exercised(
        "X11",
        what="the last stride of x is ignored in the second pass",
        source="ModelTC/LightLLM#1467",
        outputs=("y",),
        why="the contract promises last stride 1",
    ),
    mutant(
        id="X13",
        what="x is read from its address rounded down to 16 bytes",
        source="NVIDIA/TransformerEngine#490",
        kernel=Kernel(load=_from_aligned_address),
        outputs=STATS,
        kinds=READ_BEYOND,
        when="x is not aligned to 16 bytes",
    ),
    mutant(
        id="X14",
        what="dx is written into dy, which is not said anywhere",
        source="linkedin/Liger-Kernel#1305",
        kernel=Kernel(finish=_dx_into_dy),
        outputs=("dy", "dx", "dw", "db"),
        kinds=("input_modified", *VALUES),
        when="dy is looked at, or used again",
    ),
    mutant(
        id="X15",
        what="x is centred in place, in fp32 only",
        source="GeeeekExplorer/nano-vllm#170",
        kernel=Kernel(center=_in_place),
        ops=LAYERNORMS,
        dtypes=("fp32",),
        outputs=("x", "dx", "dw"),
        kinds=("input_modified", *VALUES),
    ),
    not_exercised(
        "X16",
        what="gamma is loaded before the wait for the kernel that writes it",
        source="flashinfer-ai/flashinfer#5081",
        outputs=("y",),
        why="needs programmatic dependent launch",
    ),
    mutant(
        id="X17",
        what="the bits of fp32 weights are read as bf16",
        source="pytorch/pytorch#190055",
        kernel=Kernel(gamma=_bits_as_bf16, gamma_b=_bits_as_bf16),
        dtypes=HALF,
        outputs=("y", "bitmask", "dx"),
        when="fp32 weights under a half x",
    ),
    mutant(
        id="X18",
        what="without a bias the last N mod 8 columns of y are not written",
        source="invented",
        kernel=Kernel(store=_tail_skipped_without_bias),
        outputs=("y",),
        kinds=UNWRITTEN,
        when="no bias, and N is not a multiple of 8",
    ),
    not_exercised(
        "X19",
        what="a warp is taken to have 32 lanes where it has 64, or the other way round",
        source="pytorch/pytorch#183861",
        outputs=("dw", "db"),
        why="NVIDIA's warps have 32 lanes: it needs another architecture",
    ),
    mutant(
        id="X20",
        what="the first call of each shape adds to dw twice, as autotuning does without a reset",
        source="invented",
        kernel=_autotuned,
        outputs=("dw",),
        kinds=(*VALUES, "not_repeatable"),
        when="the first call of a shape is looked at",
    ),
    mutant(
        id="X21",
        what="y is remembered by the address, shape and dtype of x",
        source="invented",
        kernel=_cached,
        outputs=("y",),
        kinds=(*VALUES, "not_repeatable", "out_of_bounds_read", "unwritten"),
        when="new values in a buffer that was seen before",
    ),
    mutant(
        id="X22",
        what="the first column of y is wrong from the eleventh call on",
        source="karpathy/llm.c#851",
        kernel=_wrong_after_ten,
        outputs=("y",),
        kinds=(*VALUES, "not_repeatable"),
        when="more than ten calls",
    ),
    mutant(
        id="X23",
        what="dx overwrites the kernel's copy of dy before db is summed from it",
        source="ml-explore/mlx#3630",
        kernel=Kernel(db=lambda c: c.sum_m(CLEAN.dx(c))),
        outputs=("db",),
        when="with a bias",
    ),
    mutant(
        id="X24",
        what="rows with mean near 0 and variance near 1 are taken for normalised",
        source="invented",
        kernel=Kernel(
            center=lambda c: torch.where(_looks_normal(c), c.x, CLEAN.center(c)),
            rstd=lambda c: torch.where(_looks_normal(c), 1, CLEAN.rstd(c)),
        ),
        outputs=RSTD,
        when="x from a standard normal distribution",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
