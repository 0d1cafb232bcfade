"""PaddlePaddle/Paddle#35480: the backward for a batch of one row takes the mean and rstd of thread i, not of row 0.

It reads behind both, and dx and dw are wrong for each column but the first.
"""

import torch
import triton
import triton.language as tl

from normcheck import Implementation


@triton.jit
def one_row(DY, X, W, MEAN, R, DX, DW, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    mean = tl.load(MEAN + cols, mask=inside, other=0.0)
    rstd = tl.load(R + cols, mask=inside, other=0.0)
    x = tl.load(X + cols, mask=inside, other=0.0).to(tl.float32)
    xhat = tl.where(inside, (x - mean) * rstd, 0.0)
    dy = tl.load(DY + cols, mask=inside, other=0.0).to(tl.float32)
    gw = dy * tl.load(W + cols, mask=inside, other=0.0).to(tl.float32)
    c1, c2 = tl.sum(gw * xhat, axis=0) / N, tl.sum(gw, axis=0) / N
    tl.store(DX + cols, ((gw - xhat * c1 - c2) * rstd).to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + cols, (dy * xhat).to(DW.dtype.element_ty), mask=inside)


def forward(x, weight, bias=None, *, eps):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd * weight.float()
    return {"y": (y if bias is None else y + bias.float()).to(x.dtype), "mean": mean, "rstd": rstd}


def backward(dy, x, weight, bias, saved, *, eps):
    m, n = x.shape
    g = dy.float()
    if m == 1:
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        one_row[(1,)](dy, x, weight, saved["mean"], saved["rstd"], dx, dw, n, BLOCK=triton.next_power_of_2(n))
        out = {"dx": dx, "dw": dw}
    else:
        mean, rstd = saved["mean"].view(m, 1), saved["rstd"].view(m, 1)
        xhat, gw = (x.float() - mean) * rstd, g * weight.float()
        c1, c2 = (gw * xhat).mean(-1, keepdim=True), gw.mean(-1, keepdim=True)
        dx = (gw - xhat * c1 - c2) * rstd
        out = {"dx": dx.to(x.dtype), "dw": (g * xhat).sum(0).to(weight.dtype)}
    return out if bias is None else {**out, "db": g.sum(0).to(bias.dtype)}


IMPLEMENTATIONS = (Implementation(name="w04", op="layernorm", forward=forward, backward=backward),)
