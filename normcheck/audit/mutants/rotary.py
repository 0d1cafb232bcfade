"""Faults of heads that are normed and rotated: of pairs, of angles, of heads, of weights, of v and of the gradient.

Each differs from a clean kernel of ``turned.py`` by the steps that it states.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import HALF, chain_in, rounded
from normcheck.audit.mutants.mutant import READ_BEYOND, Mutant, implementations, mutant_of
from normcheck.audit.mutants.turned import OPS, Call, Turned, turn

_TILE, _WRITTEN = 4, 192


def _half_a_head_away(c: Call) -> Tensor:
    """The partner of a column is half a head away, though less of it is rotated."""
    half = c.D // 2
    a, b = c.n[..., : c.P], c.n[..., half : half + c.P]
    y = c.n.clone()
    y[..., : c.P], y[..., half : half + c.P] = a * c.cos - b * c.sin, b * c.cos + a * c.sin
    return y


def _all_of_it(c: Call) -> Tensor:
    """Half of a head has angles: those of cos and sin, again and again."""
    pairs, times = c.D // 2, -(-c.D // 2 // c.P)
    cos, sin = (t.repeat(1, 1, times)[..., :pairs] for t in (c.cos, c.sin))
    a, b, rest = c.parts(c.n, pairs)
    return c.joined(a * cos - b * sin, b * cos + a * sin, rest)


def _written_in_halves(c: Call) -> Tensor:
    """Columns side by side are rotated, and stored half of the rotated ones apart."""
    a, b, rest = c.n[..., 0 : 2 * c.P : 2], c.n[..., 1 : 2 * c.P : 2], c.n[..., 2 * c.P :]
    return torch.cat((a * c.cos - b * c.sin, b * c.cos + a * c.sin, rest), -1)


def _one_after_the_other(c: Call) -> Tensor:
    """The second column of a pair is made of the first one as it has been rotated."""
    a, b, rest = c.parts(c.n)
    first = a * c.cos - b * c.sin
    return c.joined(first, b * c.cos + first * c.sin, rest)


def _of_row(c: Call) -> Tensor:
    """One mean over all heads of q, and one over those of k, as OLMo 2 norms them."""
    square = c.x * c.x
    means = [t.mean((1, 2), keepdim=True).expand(-1, t.shape[1], 1) for t in square.tensor_split((c.Q,), dim=1)]
    return torch.rsqrt(torch.cat(means, 1) + c.eps)


def _spelled(c: Call, t: Tensor) -> Tensor:
    """``t`` read as packed, whatever its row stride is."""
    return t.as_strided(t.shape, (t.shape[1], 1)) if t.shape[0] > 1 else t


def _v_as_k(c: Call, *, normed: bool) -> Tensor:
    """v, rotated, or normed, as the heads before it are."""
    v = c.rest(c.x_io).to(c.kernel.work)
    if normed:
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + c.eps)
    return turn(c, v, c.sin)


def _unwritten(c: Call) -> Tensor:
    """Columns of a head behind the first 192 are left 0."""
    y = turn(c, c.n, c.sin)
    y[..., _WRITTEN:] = 0
    return y


def _rest(c: Call, rest: Tensor) -> Tensor:
    """Rotated, with another rest of each head."""
    return torch.cat((turn(c, c.n, c.sin)[..., : 2 * c.P], rest[..., 2 * c.P :]), -1)


def _only(c: Call, first: int, end: int) -> Tensor:
    """Heads from ``first`` to ``end`` are rotated, others normed alone."""
    y, turned = c.n.clone(), turn(c, c.n, c.sin)
    y[:, first:end] = turned[:, first:end]
    return y


def _weight_of_tile(c: Call) -> Tensor:
    """Four heads have the weight of the first of them."""
    own = c.of_heads(*c.weights)
    first = torch.arange(c.G, device=own.device) // _TILE * _TILE
    return own[first]


def _whole_tiles(c: Call) -> Tensor:
    """Tokens behind the last whole tile of two, if there is one, are left as they are."""
    y = turn(c, c.n, c.sin)
    if c.T > 1 and c.T % 2:
        y[-1] = c.x[-1]
    return y


def _squares_in_io(c: Call) -> Tensor:
    squares = (c.x * c.x).reshape(-1, c.D).t()
    return torch.rsqrt(chain_in(squares, c.x_io.dtype).reshape(c.T, c.G, 1) / c.D + c.eps)


def _weighted_last(c: Call) -> Tensor:
    """The weight is applied to columns that have been rotated."""
    return turn(c, c.xh, c.sin) * c.w


def _other_c1(c: Call, mean: Tensor) -> Tensor:
    """dx with another mean of xhat * dy * weight, (T, 1 or G, 1)."""
    return (c.g * c.w - c.xh * mean) * c.r


_fault = partial(mutant_of, ops=OPS)

_CLEAN = Turned()
_Y, _BOTH, _ALL = ("y",), ("y", "dx"), ("rstd", "y", "dx")
_PARTIAL, _SEVERAL = "less than all of a head is rotated", "several tokens"

MUTANTS: tuple[Mutant, ...] = (
    _fault("mK01", "columns side by side are rotated, though halves are declared", Turned(interleaved=True), _BOTH,
           source="NVIDIA/TensorRT-LLM#13052", model=_CLEAN.declared),
    _fault("mK02", "columns side by side are rotated, and stored as halves", Turned(output=_written_in_halves), _Y,
           source="NVIDIA/TensorRT-LLM#13052"),
    _fault("mK03", "the partner of a column is half a head away, though less is rotated", Turned(
           output=_half_a_head_away), _Y, source="vllm-project/vllm#51049", when=_PARTIAL),
    _fault("mK04", "all of a head is rotated, whatever cos has columns for", Turned(output=_all_of_it), _Y,
           source="vllm-project/vllm#43676", when=_PARTIAL),
    _fault("mK05", "q has the weight of k, and k that of q", Turned(
           weight=lambda c: c.of_heads(c.weights[1], c.weights[0])), _BOTH, source="hpcaitech/ColossalAI#6444"),
    _fault("mK06", "k has the weight of q", Turned(weight=lambda c: c.of_heads(c.weights[0], c.weights[0])), _BOTH),
    _fault("mK07", "a tile of four heads has the weight of its first", Turned(weight=_weight_of_tile), _BOTH,
           when="q and k share a tile of four heads"),
    _fault("mK08", "the mean is over all heads of q, or of k", Turned(rstd=_of_row), _ALL, when="several heads of q"),
    _fault("mK09", "the sign of sin is wrong in both columns", Turned(output=lambda c: turn(c, c.n, -c.sin)), _Y),
    _fault("mK10", "cos and sin are swapped", Turned(angles=lambda c: c.both_tables()[::-1]), _BOTH),
    _fault("mK11", "the second column of a pair is made of the rotated first one", Turned(
           output=_one_after_the_other), _Y),
    _fault("mK12", "each token has the angles of the next one", Turned(
           angles=lambda c: c.both_tables(lambda t: t.roll(-1, 0))), _BOTH, when=_SEVERAL),
    _fault("mK13", "every token has the angles of the first one", Turned(
           angles=lambda c: c.both_tables(lambda t: t[:1].expand_as(t))), _BOTH, source="sgl-project/sglang#35744",
           when=_SEVERAL),
    _fault("mK14", "the row stride of cos and sin is ignored", Turned(
           angles=lambda c: c.both_tables(lambda t: _spelled(c, t))), (*_BOTH, ""),
           kinds=READ_BEYOND, when="strided cos and sin of several tokens"),
    _fault("mK15", "cos and sin are rounded to bf16", Turned(
           angles=lambda c: c.both_tables(lambda t: rounded(t, torch.bfloat16))), _BOTH, dtypes=("fp16", "fp32")),
    _fault("mK16", "v is rotated as well", Turned(values=lambda c: _v_as_k(c, normed=False)), _Y),
    _fault("mK17", "v is normed as well", Turned(values=lambda c: _v_as_k(c, normed=True)), _Y),
    _fault("mK18", "v passes through bf16", Turned(
           values=lambda c: c.rest(c.x_io).to(torch.bfloat16)), _Y, dtypes=("fp16", "fp32")),
    _fault("mK19", "columns of a head behind the first 192 are never written", Turned(output=_unwritten), _Y,
           when="heads of more than 192 columns"),
    _fault("mK20", "what is not rotated of a head is not normed either", Turned(output=lambda c: _rest(c, c.x)), _Y,
           when=_PARTIAL),
    _fault("mK21", "what is not rotated of a head has no weight", Turned(output=lambda c: _rest(c, c.xh)), _Y,
           when=_PARTIAL),
    _fault("mK22", "k is normed, and never rotated", Turned(output=lambda c: _only(c, 0, c.Q)), _Y),
    _fault("mK23", "as many heads of k are rotated as fit those of q: the last one is left out", Turned(
           output=lambda c: _only(c, 0, c.G - 1)), _Y, source="hpcaitech/ColossalAI#6444"),
    _fault("mK24", "the weight is applied after the rotation", Turned(output=_weighted_last), _Y),
    _fault("mK25", "eps is left out", Turned(rstd=lambda c: torch.rsqrt(c.mean_of(c.x * c.x))), (*_ALL, "")),
    _fault("mK26", "eps is added outside the root", Turned(
           rstd=lambda c: 1 / (c.mean_of(c.x * c.x).sqrt() + c.eps)), _ALL),
    _fault("mK27", "squares are summed in the dtype of x", Turned(rstd=_squares_in_io), _ALL, dtypes=HALF),
    _fault("mK28", "n is rounded before it is rotated, though once is declared", Turned(rounding="normed"), _BOTH,
           model=_CLEAN.declared, dtypes=HALF),
    _fault("mK29", "each step is rounded, though n alone is declared", Turned(rounding="each"), _BOTH,
           model=Turned(rounding="normed").declared, dtypes=HALF),
    _fault("mK30", "n is not rounded before it is rotated, though that is declared", _CLEAN, _BOTH,
           model=Turned(rounding="normed").declared, dtypes=HALF),
    _fault("mK31", "the last token of an odd number is left as it is", Turned(output=_whole_tiles), _Y,
           when="an odd number of tokens, above 1"),
    _fault("mK32", "dy is rotated forward, not back", Turned(cotangent=lambda c: turn(c, c.dy, c.sin)), ("dx",)),
    _fault("mK33", "dy is not rotated back", Turned(cotangent=lambda c: c.dy), ("dx",)),
    _fault("mK34", "dx lacks the term of the mean", Turned(dx=lambda c: c.g * c.w * c.r), ("dx",)),
    _fault("mK35", "dx forgets the weight", Turned(
           dx=lambda c: (c.g - c.xh * c.mean_of(c.xh * c.g)) * c.r), ("dx",)),
    _fault("mK36", "the mean of dx is over all heads of a token", Turned(
           dx=lambda c: _other_c1(c, (c.xh * c.g * c.w).mean((1, 2), keepdim=True))), ("dx",)),
    _fault("mK37", "the mean of dx is over the rotated columns alone", Turned(
           dx=lambda c: _other_c1(c, (c.xh * c.g * c.w)[..., : 2 * c.P].sum(-1, keepdim=True) / c.D)), ("dx",),
           when=_PARTIAL),
    _fault("mK38", "dx of v is 0", Turned(dvalues=lambda c: torch.zeros_like(c.rest(c.x_io))), ("dx",)),
    _fault("mK39", "dx of k has the weight of q", Turned(
           dx=lambda c: ((wd := c.g * c.of_heads(c.weights[0], c.weights[0])) - c.xh * c.mean_of(c.xh * wd)) * c.r),
           ("dx",)),
)  # fmt: skip

IMPLEMENTATIONS = implementations(MUTANTS)
