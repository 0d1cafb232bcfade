"""Faults of the bitmask of a clamped op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normcheck.diagnosis.faults.fault import (
    Fault,
    clamped_ops,
    fault,
)
from normcheck.diagnosis.formula import TEXTBOOK, Call, Step, stored


def _reversed(c: Call) -> Tensor:
    """The bits, each byte of them from its other end; what pads the last byte is 0."""
    padded = torch.nn.functional.pad(c.bits, (0, -c.N % 8))
    return padded.view(c.M, -1, 8).flip(2).flatten(1)[:, : c.N]


def _last_flipped(c: Call) -> Tensor:
    bits = c.bits.clone()
    if bits.numel():
        bits[-1, -1] ^= True
    return bits


def _whole_bytes(c: Call) -> Tensor:
    return c.bits & (torch.arange(c.N) < c.N // 8 * 8)


def _bits(name: str, words: str, mask: Step, **more: Any) -> Fault:
    return fault(name, words, mask=mask, takes=clamped_ops, **more)


FAULTS = (
    _bits(
        "bits_ge_lower",
        "the lower limit clears no bit: >= after the clip, which always holds, or no comparison",
        lambda c: (c.y >= c.lo) & (c.y < c.hi),
    ),
    _bits(
        "bits_le_upper",
        "the upper limit clears no bit: <= after the clip, which always holds, or no comparison",
        lambda c: (c.y > c.lo) & (c.y <= c.hi),
    ),
    _bits(
        "bits_inclusive",
        "the bits compare >= and <= with the limits: it must be > and <",
        lambda c: (c.z >= c.lo) & (c.z <= c.hi),
    ),
    _bits(
        "bits_inclusive_after_clip",
        "the bits compare >= and <= after the clip: all are set",
        lambda c: (c.y >= c.lo) & (c.y <= c.hi),
    ),
    _bits(
        "bits_z_ge_lower",
        "the bits compare z >= with the lower limit: it must be >",
        lambda c: (c.z >= c.lo) & (c.z < c.hi),
    ),
    _bits(
        "bits_z_le_upper",
        "the bits compare z <= with the upper limit: it must be <",
        lambda c: (c.z > c.lo) & (c.z <= c.hi),
    ),
    _bits(
        "bits_of_stored_y",
        "the bits are those of y after its store, not of the value before it",
        lambda c: (stored(c.y, c.io) > c.lo) & (stored(c.y, c.io) < c.hi),
        narrow=True,
    ),
    _bits("bits_before_bias", "the bits are taken before the bias is added", lambda c: (c.p > c.lo) & (c.p < c.hi)),
    _bits("bits_of_xhat", "the lower limit is compared with xhat", lambda c: (c.xh > c.lo) & (c.z < c.hi)),
    _bits("bits_of_x", "the lower limit is compared with x", lambda c: (c.x > c.lo) & (c.z < c.hi)),
    _bits("bits_inverted", "the bits are inverted", lambda c: ~TEXTBOOK.mask(c).bool()),
    fault(
        "bits_order",
        "the bits of a byte are in the other order: the first column is the lowest bit",
        mask_out=_reversed,
        takes=clamped_ops,
    ),
    fault(
        "bits_order_both",
        "the bits of a byte are in the other order, in forward and in backward: the first column is the lowest bit",
        mask_out=_reversed,
        mask_in=_reversed,
        takes=clamped_ops,
    ),
    fault(
        "bits_order_backward",
        "backward reads the bits of a byte in the other order",
        mask_in=_reversed,
        takes=clamped_ops,
    ),
    fault("bits_tail_dropped", "the last N mod 8 bits of a row are dropped", mask_out=_whole_bytes, takes=clamped_ops),
    fault("bits_last_flipped", "the last bit is wrong", mask_out=_last_flipped, takes=clamped_ops),
    fault("dy_not_masked", "dy is not masked by the bits", masked=lambda c: c.dy, takes=clamped_ops),
    fault(
        "dw_not_masked",
        "dw and db take dy before it is masked by the bits",
        dw=lambda c: c.rows(c.inputs.dy.reshape(-1, c.N).double() * c.xh),
        db=lambda c: c.rows(c.inputs.dy.reshape(-1, c.N).double()),
        takes=clamped_ops,
    ),
)
