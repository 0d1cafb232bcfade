"""Correct kernels that compute in many ways: the gate must never accuse one.

Each variant serves every op but the castings of models; one serves all that have a zero-centred weight. They differ in
the order of the sums over N and M, in how the variance, 1/N, rstd, y and dx are formed, in how the bits are packed, and
in what they declare. Everything accumulates in fp32 (one variant in fp64) and every output is rounded once.

The plain functions ``layernorm``, ``layernorm_zero_centered``, ``layernorm_relu_bitmask`` and ``rmsnorm`` can also be
named on the command line (``--impl normcheck.audit.mutants.correct:rmsnorm --op rmsnorm``); their gradients come from
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from normcheck.audit.mutants.kernel import BOTH, OPS, Kernel, KernelCall
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS as ROWS
from normcheck.impls.implementation import Implementation

# --- Orders of summation over the first dimension of a (K, L) tensor. torch.cumsum does not serve: on the CPU it
# --- accumulates fp32 in a wider format, so its last row is not the sum of a chain of fp32 adds.


def _bare(t: Tensor) -> Any:
    """On a CPU a numpy array of the same memory: in a chain of small steps, calls of torch are what costs time."""
    return t.numpy() if t.device.type == "cpu" else t


def sequential(t: Tensor) -> Tensor:
    """One chain of K - 1 adds."""
    total = torch.zeros(t.shape[1:], dtype=t.dtype, device=t.device)
    chain = _bare(total)
    with numpy.errstate(all="ignore"):
        for row in _bare(t.contiguous()):
            chain += row
    return total


def reverse(t: Tensor) -> Tensor:
    """The chain from the other end."""
    return sequential(t.flip(0))


def pairwise(t: Tensor) -> Tensor:
    """A binary tree of neighbours; an odd one out waits for the next level."""
    if not len(t):
        return t.sum(0)
    while (k := len(t)) > 1:
        pairs = t[0 : k - 1 : 2] + t[1:k:2]
        t = torch.cat((pairs, t[-1:])) if k % 2 else pairs
    return t[0]


def _blocks(t: Tensor, size: int) -> Tensor:
    """(K, L) -> (blocks, size, L), padded with zeros, which change no sum."""
    padded = functional.pad(t, (0, 0, 0, -len(t) % size))
    return padded.view(len(padded) // size, size, t.shape[1])


def blocked(size: int) -> Callable[[Tensor], Tensor]:
    """A chain in each block of ``size`` neighbours, then a tree over the blocks."""
    return lambda t: pairwise(sequential(_blocks(t, min(size, max(len(t), 1))).transpose(0, 1)))


def strided(lanes: int) -> Callable[[Tensor], Tensor]:
    """A chain in each lane, which takes every ``lanes``-th element, then a tree over the lanes."""
    return lambda t: pairwise(sequential(_blocks(t, lanes)))


# --- Mean and variance in one pass. The mean step leaves the variance in the call, for the variance step.


def welford(c: KernelCall) -> Tensor:
    """Welford's update, column by column."""
    m, m2 = torch.zeros_like(c.x[:, 0]), torch.zeros_like(c.x[:, 0])
    mean, squares = _bare(m), _bare(m2)
    with numpy.errstate(all="ignore"):
        for k, column in enumerate(_bare(c.x.t().contiguous()), 1):
            delta = column - mean
            mean += delta / k
            squares += delta * (column - mean)
    c.v = (m2 / c.N)[:, None]
    return m[:, None]


def chan(parts: Callable[[Tensor], list[Tensor]]) -> Callable[[KernelCall], Tensor]:
    """Two passes in each part of a row, then Chan's merge of the parts, one after the other."""

    def mean(c: KernelCall) -> Tensor:
        n, m, m2 = 0, c.zeros, c.zeros
        for part in parts(c.x):
            k = part.shape[1]
            part_mean = part.sum(1, keepdim=True) / k
            part_m2 = ((part - part_mean) ** 2).sum(1, keepdim=True)
            if not n:  # nothing to merge with yet, and the square of a huge first mean would overflow
                n, m, m2 = k, part_mean, part_m2
                continue
            delta = part_mean - m
            m2 = m2 + part_m2 + delta * delta * (n * k / (n + k))
            m = m + delta * (k / (n + k))
            n += k
        c.v = m2 / n
        return m

    return mean


def _merged_variance(c: KernelCall) -> Tensor:
    """The variance that the mean step left. rmsnorm has no mean step: its mean of squares is computed here."""
    return c.v if c.centered else c.mean_n(c.x * c.x)


# --- The last steps of forward and backward, in the forms that real kernels use.


def fma(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """a*b + c rounded once to fp32, as a fused multiply-add does.

    Emulated: the product of two fp32 is exact in fp64, the sum is rounded there and again to fp32, which is off by at
    most 2**-29 of the last rounding.
    """
    return a * b if c is None else (a.double() * b.double() + c.double()).float()


def _rsqrt_2ulp(c: KernelCall) -> Tensor:
    """Two floats above the correctly rounded 1/sqrt: the error that a GPU's approximate rsqrt may have."""
    r = torch.rsqrt((c.v + c.eps).double()).float()
    up = torch.full_like(r, float("inf"))
    return torch.nextafter(torch.nextafter(r, up), up)


def _raw_dx(c: KernelCall) -> Tensor:
    """dx from the sums of wd and wd*x, with neither of them centred, as torch does on the CPU."""
    s, sx = c.sum_n(c.wd), c.sum_n(c.wd * c.x)
    if not c.centered:
        s = c.zeros
    slope = (s * c.m - sx) * c.r * c.r * c.r / c.N
    return c.r * c.wd + slope * c.x - (slope * c.m + s * c.r / c.N)


def _by_product(s: Tensor, n: int) -> Tensor:
    """s times 1/n, itself rounded to the precision of s."""
    return s * torch.tensor(1 / n, dtype=s.dtype, device=s.device)


def _projected_dx(c: KernelCall) -> Tensor:
    """The mean of dy * g is subtracted before the product with xhat, whose own mean is not quite 0."""
    g = c.wd - c.c2
    return (g - c.xh * c.mean_n(g * c.xh)) * c.r


def _two_terms_dx(c: KernelCall) -> Tensor:
    """With the derivative of the variance by the mean, which would be 0 without roundings."""
    by_mean = c.c1 * c.mean_n(c.xh) - c.c2 if c.centered else 0
    return c.wd * c.r - c.xh * c.c1 * c.r + by_mean * c.r


def _n_scaled_dx(c: KernelCall) -> Tensor:
    """dx with one division by N at the end."""
    s2 = c.sum_n(c.wd) if c.centered else c.zeros
    return c.r / c.N * (c.N * c.wd - s2 - c.xh * c.sum_n(c.xh * c.wd))


KERNELS: Mapping[str, Kernel] = {
    "sequential_two_pass": Kernel(reduce_n=sequential, reduce_m=sequential),
    "reverse_rsqrt_product": Kernel(
        reduce_n=reverse,
        reduce_m=reverse,
        over_n=_by_product,
        rstd=lambda c: torch.rsqrt(c.v + c.eps),
        preact=lambda c: c.plus_b(c.xc * (c.r * c.g)),
        dx=lambda c: c.r * c.wd - c.r * c.xh * c.c1 - c.r * c.c2,
        packed=False,
    ),
    "pairwise_fma": Kernel(
        reduce_n=pairwise,
        reduce_m=pairwise,
        preact=lambda c: fma(c.xh, c.g, c.b),
        dx=lambda c: (c.wd - c.c2 - c.xh * c.c1) * c.r,
    ),
    "blocked128_gain_fma": Kernel(
        reduce_n=blocked(128),
        reduce_m=blocked(128),
        over_n=_by_product,
        preact=lambda c: fma(c.xc, c.r * c.g, c.b),
        dx=lambda c: (c.wd - fma(c.xh, c.c1, c.c2)) * c.r,
        packed=False,
    ),
    "blocked1024_n_scaled": Kernel(reduce_n=blocked(1024), reduce_m=blocked(1024), dx=_n_scaled_dx),
    "strided32_rsqrt_2ulp": Kernel(
        reduce_n=strided(32), reduce_m=strided(32), over_n=_by_product, rstd=_rsqrt_2ulp, dx=_two_terms_dx
    ),
    "welford_sequential": Kernel(
        reduce_n=sequential, reduce_m=reverse, mean=welford, variance=_merged_variance, packed=False
    ),
    "welford_tree_fma": Kernel(
        reduce_n=pairwise,
        reduce_m=pairwise,
        mean=welford,
        variance=_merged_variance,
        rstd=_rsqrt_2ulp,
        preact=lambda c: fma(c.xh, c.g, c.b),
        dx=lambda c: (c.wd - c.c2 - c.xh * c.c1) * c.r,
    ),
    "chan_blocks": Kernel(
        reduce_n=blocked(128),
        reduce_m=strided(32),
        mean=chan(lambda x: list(torch.split(x, 32, 1))),
        variance=_merged_variance,
        preact=lambda c: c.plus_b(c.xc * (c.r * c.g)),
        dx=_n_scaled_dx,
    ),
    "chan_strided_fma": Kernel(
        reduce_n=strided(32),
        reduce_m=blocked(128),
        mean=chan(lambda x: [x[:, lane::32] for lane in range(min(32, x.shape[1]))]),
        variance=_merged_variance,
        rstd=lambda c: torch.rsqrt(c.v + c.eps),
        preact=lambda c: fma(c.xc, c.r * c.g, c.b),
        dx=_projected_dx,
        packed=False,
    ),
    "folded": Kernel(
        preact=lambda c: c.x * (c.r * c.g) + ((0 if c.b is None else c.b) - c.m * (c.r * c.g)),
        dx=lambda c: c.r * c.wd - c.r * c.xh * c.c1 - c.r * c.c2,
    ),
    "fp64_inside": Kernel(work=torch.float64),
    "raw_backward": Kernel(dx=_raw_dx, dw=lambda c: c.sum_m(c.dy * (c.x * c.r - c.m * c.r))),
}
"""Name of the variant -> kernel."""

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "sequential_two_pass": {"weights": BOTH},
    "reverse_rsqrt_product": {"weights": BOTH},
    "pairwise_fma": {"ranks": (2, 3), "weights": BOTH},
    "blocked128_gain_fma": {"model": {"chain": 128, "variance": "two_pass"}, "weights": BOTH},
    "folded": {"model": {"y_form": "folded"}, "weights": BOTH},
    # y comes from the fp64 statistics; the saved statistics are rounded to fp32.
    "fp64_inside": {"model": {"y_given_stats": False}, "ranks": (2, 3), "weights": BOTH},
    "raw_backward": {"model": {"bwd_form": "raw"}, "weights": BOTH},
}
"""Name of the variant -> what its implementations declare beyond the defaults."""


# --- Plain functions in elementary torch ops, with gradients by autograd. Each upcasts an input once, so that a
# --- gradient is accumulated in fp32 and rounded once.


def _clip(z: Tensor, lower_clip: float, upper_clip: float) -> Tensor:
    """The clipped ReLU with slope 0 at its limits; torch.clamp has slope 1 there."""
    z = torch.where(z > lower_clip, z, lower_clip)
    return torch.where(z < upper_clip, z, upper_clip)


def _plus(z: Tensor, bias: Tensor | None) -> Tensor:
    return z if bias is None else z + bias.float()


def _scaled(op: Op, xhat: Tensor, weight: Tensor | None) -> Tensor:
    return xhat if weight is None else xhat * _gamma(op, weight)


def _gamma(op: Op, weight: Tensor) -> Tensor:
    return 1 + weight.float() if op.zero_centered else weight.float()


def by_var(op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **limits: float) -> Tensor:
    """y by its mean and variance (M, 1), of fp32 copies; no bits."""
    xf = x.float()
    if op.centered:
        xhat = (xf - xf.mean(-1, keepdim=True)) * torch.rsqrt(xf.var(-1, unbiased=False, keepdim=True) + eps)
    else:
        xhat = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    z = _plus(_scaled(op, xhat, weight), bias)
    return (_clip(z, **limits) if op.clamped else z).to(x.dtype)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm, x and y (M, N)."""
    return by_var(ROWS["layernorm"], x, weight, bias, eps=eps)


def layernorm_zero_centered(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm whose weight is stored as gamma - 1."""
    return by_var(ROWS["layernorm_zero_centered"], x, weight, bias, eps=eps)


def layernorm_relu_bitmask(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, lower_clip: float, upper_clip: float
) -> Tensor:
    """LayerNorm with a clipped ReLU; y only, no bits."""
    limits = {"lower_clip": lower_clip, "upper_clip": upper_clip}
    return by_var(ROWS["layernorm_relu_bitmask"], x, weight, bias, eps=eps, **limits)


def rmsnorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm."""
    return by_var(ROWS["rmsnorm"], x, weight, bias, eps=eps)


def _squares(
    op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **limits: float
) -> dict[str, Tensor]:
    """Centre, square, average, divide by the root; also returns statistics and bits."""
    xf = x.float()
    mean = xf.mean(-1, keepdim=True) if op.centered else xf.new_zeros(())
    xc = xf - mean
    root = torch.sqrt((xc * xc).mean(-1, keepdim=True) + eps)
    z = _plus(_scaled(op, xc / root, weight), bias)
    out = {"rstd": (1 / root).detach()}
    if op.centered:
        out["mean"] = mean.detach()
    if op.clamped:
        out["bitmask"] = (z > limits["lower_clip"]) & (z < limits["upper_clip"])
        z = _clip(z, **limits)
    return out | {"y": z.to(x.dtype)}


def by_functional(
    op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **limits: float
) -> Tensor:
    """torch.nn.functional on fp32 copies."""
    xf, gamma = x.float(), None if weight is None else _gamma(op, weight)
    if op.centered:
        z = functional.layer_norm(xf, x.shape[-1:], gamma, None if bias is None else bias.float(), eps)
    else:
        z = _plus(functional.rms_norm(xf, x.shape[-1:], gamma, eps), bias)
    return (_clip(z, **limits) if op.clamped else z).to(x.dtype)


def by_product(
    op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """xhat is added to its product with a zero-centred weight, as a multiply-add takes it; and the sum, if any."""
    added = x if residual is None else x + residual
    wide = added.float()
    if op.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = _plus(xhat + xhat * weight.float(), bias).to(x.dtype)
    return y if residual is None else (y, added)


CONTROLS: tuple[Implementation, ...] = (
    *(kernel.implementation(name, op, **FIELDS.get(name, {})) for name, kernel in KERNELS.items() for op in OPS),
    *(
        Implementation(name="autograd_var", op=op, forward=partial(by_var, ROWS[op]), ranks=(2, 3), weights=BOTH)
        for op in OPS
    ),
    *(Implementation(name="autograd_squares", op=op, forward=partial(_squares, ROWS[op]), weights=BOTH) for op in OPS),
    *(
        Implementation(name="autograd_by_product", op=op.name, forward=partial(by_product, op))
        for op in ROWS.values()
        if op.zero_centered
    ),
    # torch's own CPU backward of layer_norm works on raw moments.
    *(
        Implementation(
            name="autograd_functional",
            op=op,
            forward=partial(by_functional, ROWS[op]),
            model={"bwd_form": "raw"},
            weights=BOTH,
        )
        for op in OPS
    ),
)
"""Every variant of every op."""

IMPLEMENTATIONS = CONTROLS
