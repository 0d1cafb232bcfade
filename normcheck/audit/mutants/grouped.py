"""Faults of norms of groups of channels: of groups, of channels, of memory, of silu and of the gradients of each.

Each differs from a clean kernel of ``channels.py`` by the steps that it states.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from normcheck.audit.mutants.channels import OPS, Call, Grouped
from normcheck.audit.mutants.kernel import HALF, chain_in, rounded
from normcheck.audit.mutants.mutant import READ_BEYOND, STATS, Mutant, implementations, mutant_of

_BLOCK = 8  # elements that a faulty kernel takes at a time


def _by_memory(c: Call, t: Tensor) -> Tensor:
    """The elements in the order of memory, whatever the strides of C and L say."""
    samples = t.as_strided((c.B, c.C * c.L), (t.stride(0) if c.B > 1 else c.C * c.L, 1))
    return samples.reshape(c.B * c.G, c.K).to(c.kernel.work)


def _of_offset(c: Call) -> Tensor:
    """The channel from the place of an element in the memory of its sample, as if that were (C, L)."""
    if c.x_io.stride(1) != 1 or c.L == 1:
        return c.elements() // c.L
    channel, at = c.elements() // c.L, c.elements() % c.L
    return (at * c.C + channel) // c.L


def _of_blocks(c: Call, t: Tensor) -> Tensor:
    """The mean over the elements of a group that fill blocks, divided by all; over all if none does."""
    whole = c.K // _BLOCK * _BLOCK or c.K
    return t[:, :whole].sum(1, keepdim=True) / c.K


def _channel_blocks(c: Call) -> Tensor:
    """bool (K,): the elements of a group in the channels of whole pairs."""
    channels = c.C // c.G
    return torch.arange(c.K, device=c.x.device) // c.L < max(channels // 2 * 2, 1)


def _with_padding(c: Call) -> Tensor:
    """The variance with the zeros behind a ragged group, which are far from the mean."""
    padded = -(-c.K // _BLOCK) * _BLOCK
    xc = c.x - c.m
    squares = (xc * xc).sum(1, keepdim=True) + (padded - c.K) * c.m * c.m
    return torch.rsqrt(squares / c.K + c.eps)


def _unbiased(c: Call) -> Tensor:
    return torch.rsqrt((c.x - c.m).square().sum(1, keepdim=True) / max(c.K - 1, 1) + c.eps)


def _cancelling(c: Call) -> Tensor:
    return torch.rsqrt((c.mean_of(c.x * c.x) - c.m * c.m).clamp(min=0) + c.eps)


def _squares_in_half(c: Call) -> Tensor:
    """x² in fp16, which overflows from 256 on."""
    return torch.rsqrt((c.mean_of(rounded(c.x * c.x, torch.float16)) - c.m * c.m).clamp(min=0) + c.eps)


def _of_channels(c: Call) -> Tensor:
    """The mean of each channel, in place of its group's."""
    of_channel = c.x.reshape(-1, c.L).mean(1, keepdim=True).expand(-1, c.L)
    return of_channel.reshape(c.x.shape)


def _per_group(c: Call, t: Tensor) -> Tensor:
    """The sum over a whole group, for each of its channels."""
    return t.reshape(c.B, c.G, c.K).sum((0, 2)).repeat_interleave(c.C // c.G) / (c.C // c.G)


def _without_sample(c: Call, t: Tensor) -> Tensor:
    """The sum over all samples but the last, if there are others."""
    samples = t.reshape(c.B, c.C, c.L)
    return samples[: max(c.B - 1, 1)].sum((0, 2))


def _last_group_first(c: Call) -> Tensor:
    """The channel of each element, of the last group those of the first."""
    channel = (c.elements() // c.L).clone()
    channel[-1] = channel[0]
    return channel


_fault = partial(mutant_of, ops=OPS)

_RSTD = ("rstd", "y", "dx", "dw", "db")
_EVERY = (*STATS, "db")
_SEVERAL, _LAST = "several groups of several channels", "channels-last memory"
_SILU = Grouped(silu=True)

MUTANTS: tuple[Mutant, ...] = (
    _fault("mP01", "weight and bias are indexed by group, not by channel", Grouped(
           channel=lambda c: c.elements() // c.K, bias_channel=lambda c: c.elements() // c.K),
           ("y", "dx"), source="linkedin/Liger-Kernel#1375", when="several channels of a group"),
    _fault("mP02", "the weight is indexed by the linear offset of x", Grouped(
           channel=lambda c: c.elements() % c.C), ("y", "dx"), source="flagos-ai/FlagGems#4984", when="L above 1"),
    _fault("mP03", "the channel is that of the place in memory, as if it were channels-first", Grouped(
           channel=_of_offset), ("y", "dx"), when=_LAST),
    _fault("mP04", "channels-last memory is read as channels-first", Grouped(read=_by_memory),
           (*_EVERY, ""), source="pytorch/pytorch#140913", kinds=READ_BEYOND, when=_LAST),
    _fault("mP05", "the variance is divided by K - 1", Grouped(rstd=_unbiased), _RSTD,
           source="Oneflow-Inc/oneflow#9560", widest=4096),
    _fault("mP06", "the variance is E[x^2] - E[x]^2", Grouped(rstd=_cancelling), _RSTD,
           source="tenstorrent/tt-metal#57223", when="groups far from 0"),
    _fault("mP07", "the mean is that of a channel, not of its group", Grouped(
           xhat=lambda c: (c.x - _of_channels(c)) * c.r), ("y",), when="several channels of a group"),
    _fault("mP08", "eps is added outside the root", Grouped(
           rstd=lambda c: 1 / (c.mean_of((c.x - c.m).square()).sqrt() + c.eps)), _RSTD),
    _fault("mP09", "the elements of a group behind its last whole block are left out of the mean", Grouped(
           mean=lambda c: _of_blocks(c, c.x)), _EVERY, source="flagos-ai/FlagGems#4984", when="a ragged group"),
    _fault("mP10", "the padding of a ragged group counts in its variance", Grouped(rstd=_with_padding), _RSTD,
           source="tenstorrent/tt-metal#50682", when="a ragged group far from 0"),
    _fault("mP11", "the last channel of a group with an odd number is left out of the variance", Grouped(
           rstd=lambda c: torch.rsqrt(c.mean_of((c.x - c.m).square() * _channel_blocks(c)) + c.eps)), _RSTD,
           when="an odd number of channels of a group, above 1"),
    _fault("mP12", "the last group has the weight of the first one", Grouped(channel=_last_group_first),
           ("y", "dx"), when="several groups"),
    _fault("mP13", "the number of groups is ignored: all channels are one group", Grouped(groups=lambda c, groups: 1),
           ("y", "dx", "dw"), when="several groups"),
    _fault("mP14", "each channel is a group, whatever groups says", Grouped(groups=lambda c, groups: c.C),
           ("y", "dx", "dw"), source="flagos-ai/FlagGems#1057", when="several channels of a group"),
    _fault("mP15", "x^2 in fp16", Grouped(rstd=_squares_in_half), _RSTD, source="tenstorrent/tt-metal#26622"),
    _fault("mP16", "silu is applied before weight and bias", Grouped(
           silu=True, output=lambda c: c.xh * torch.sigmoid(c.xh) * c.w + c.b), ("y",)),
    _fault("mP17", "silu is applied, though none is declared", _SILU, ("y", "dx", "dw", "db"),
           model=Grouped().declared),
    _fault("mP18", "silu is not applied, though it is declared", Grouped(), ("y", "dx", "dw", "db"),
           model=_SILU.declared),
    _fault("mP19", "the backward leaves silu out", Grouped(silu=True, cotangent=lambda c: c.dy), ("dx", "dw", "db")),
    _fault("mP20", "the slope of silu is its sigmoid alone", Grouped(
           silu=True, cotangent=lambda c: c.dy * torch.sigmoid(c.z)), ("dx", "dw", "db")),
    _fault("mP21", "the slope of silu is that at xhat, without weight and bias", Grouped(
           silu=True, cotangent=lambda c: c.dy * (s := torch.sigmoid(c.xh)) * (1 + c.xh * (1 - s))),
           ("dx", "dw", "db")),
    _fault("mP22", "the norm is rounded before silu, though once is declared", Grouped(silu=True, each=True),
           ("y", "dx", "dw", "db"), model=_SILU.declared, dtypes=HALF),
    _fault("mP23", "dw is the mean over the channels of a group", Grouped(
           dw=lambda c: _per_group(c, c.dz * c.xh)), ("dw",), when="several channels of a group"),
    _fault("mP24", "dw misses the last sample", Grouped(dw=lambda c: _without_sample(c, c.dz * c.xh)), ("dw",),
           when="several samples"),
    _fault("mP25", "db is that of the first element of each channel alone", Grouped(
           db=lambda c: c.dz.reshape(c.B, c.C, c.L)[:, :, 0].sum(0)), ("db",), when="L above 1"),
    _fault("mP26", "partial sums of dw are rounded to the dtype of x", Grouped(
           dw=lambda c: chain_in((c.dz * c.xh).reshape(c.B, c.C, c.L).transpose(1, 2).reshape(-1, c.C), c.io)),
           ("dw",), dtypes=HALF, when="many elements of a channel"),
    _fault("mP27", "dx lacks the term of the mean", Grouped(
           dx=lambda c: (c.wd - c.xh * c.mean_of(c.xh * c.wd)) * c.r), ("dx",)),
    _fault("mP28", "dx lacks the term of the variance", Grouped(dx=lambda c: (c.wd - c.mean_of(c.wd)) * c.r), ("dx",)),
    _fault("mP29", "the means of dx are those of a channel, not of its group", Grouped(
           dx=lambda c: (c.wd - c.xh * (c.xh * c.wd).reshape(-1, c.L).mean(1, keepdim=True).expand(-1, c.L)
           .reshape(c.x.shape) - c.mean_of(c.wd)) * c.r), ("dx",), source="linkedin/Liger-Kernel#1376",
           when="several channels of a group"),
    _fault("mP30", "dx forgets the weight", Grouped(weighted=lambda c: c.dz), ("dx",)),
    _fault("mP31", "the bias is never added", Grouped(norm=lambda c: c.xh * c.w), ("y",), when="a bias"),
    _fault("mP32", "the bias has the channel of the next element", Grouped(
           bias_channel=lambda c: (c.elements() // c.L + 1) % c.C), ("y",), when="a bias of several channels"),
)  # fmt: skip

IMPLEMENTATIONS = implementations(MUTANTS)
