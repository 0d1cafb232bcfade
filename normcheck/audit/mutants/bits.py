"""Faults in the bits of the clipped ReLU. The catalogue knows no public bug of packed bits, so all are invented.

mB02 is the reverse of the catalogue's: it declares bits of the fp32 value before the store, and takes them from the
stored value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import CLEAN, HALF, RELU, Kernel, KernelCall, only, pack, rounded, unpack
from normcheck.audit.mutants.mutant import UNWRITTEN, Mutant, implementations, mutant


def _last_bit_flipped(c: KernelCall) -> Tensor:
    bits = CLEAN.mask(c)
    bits[-1:, -1] ^= True
    return bits


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="mB01",
        what="the bits compare y, after the clip, with >= at the lower limit",
        source="invented",
        kernel=Kernel(mask=lambda c: (c.y >= c.lo) & (c.y < c.hi)),
        ops=RELU,
        outputs=("bitmask",),
        when="z at or below the lower limit",
    ),
    mutant(
        id="mB02",
        what="the bits are those of the stored y, not of the fp32 value before the store",
        source="invented",
        kernel=Kernel(mask=lambda c: (rounded(c.y, c.io) > c.lo) & (rounded(c.y, c.io) < c.hi)),
        ops=RELU,
        dtypes=HALF,
        outputs=("bitmask",),
        when="z rounds to a limit (about M*N > 64); a fault only where bits of the fp32 value are promised, as here",
        model={"bitmask_compare": "fp32"},
    ),
    mutant(
        id="mB03",
        what="the bits compare y, after the clip, with <= at the upper limit",
        source="invented",
        kernel=Kernel(mask=lambda c: (c.y > c.lo) & (c.y <= c.hi)),
        ops=RELU,
        outputs=("bitmask",),
        when="z at or above the upper limit",
    ),
    mutant(
        id="mB04",
        what="the bits are taken before the bias is added",
        source="invented",
        kernel=Kernel(mask=lambda c: (c.xh * c.g > c.lo) & (c.xh * c.g < c.hi)),
        ops=RELU,
        outputs=("bitmask",),
    ),
    mutant(
        id="mB05",
        what="forward and backward agree on bits that are packed most significant first",
        source="invented",
        kernel=Kernel(
            mask_out=lambda c: pack(c.bits, msb_first=True),
            mask_in=lambda c: unpack(c.saved["bitmask"], c.N, msb_first=True),
        ),
        ops=RELU,
        outputs=("bitmask", "dx", "dw", "db"),
    ),
    mutant(
        id="mB06",
        what="a last 32-bit word that is not full is not written",
        source="invented",
        kernel=Kernel(mask_out=lambda c: only(pack(c.bits), ..., slice(c.N // 32 * 4))),
        ops=RELU,
        outputs=("bitmask",),
        kinds=UNWRITTEN,
        when="N is not a multiple of 32",
    ),
    mutant(
        id="mB07",
        what="the last N mod 8 bits are dropped",
        source="invented",
        kernel=Kernel(mask_out=lambda c: pack(c.bits & (torch.arange(c.N, device=c.x.device) < c.N // 8 * 8))),
        ops=RELU,
        outputs=("bitmask",),
        when="N is not a multiple of 8",
    ),
    mutant(
        id="mB08",
        what="the lower limit is compared with xhat",
        source="invented",
        kernel=Kernel(mask=lambda c: (c.xh > c.lo) & (c.z < c.hi)),
        ops=RELU,
        outputs=("bitmask",),
    ),
    mutant(
        id="mB09",
        what="dy is not masked by the bits",
        source="invented",
        kernel=Kernel(masked=lambda c: c.dy),
        ops=RELU,
        outputs=("dx", "dw", "db"),
    ),
    mutant(
        id="mB10",
        what="the lower limit is compared with x",
        source="invented",
        kernel=Kernel(mask=lambda c: (c.x > c.lo) & (c.z < c.hi)),
        ops=RELU,
        outputs=("bitmask",),
    ),
    mutant(
        id="mB12",
        what="the bits do not look at the upper limit",
        source="invented",
        kernel=Kernel(mask=lambda c: c.z > c.lo),
        ops=RELU,
        outputs=("bitmask",),
        when="z above the upper limit",
    ),
    mutant(
        id="mB13",
        what="the last bit is flipped",
        source="invented",
        kernel=Kernel(mask=_last_bit_flipped),
        ops=RELU,
        outputs=("bitmask",),
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
