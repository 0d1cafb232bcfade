"""Faults in gamma, the bias, and the store of y."""

from __future__ import annotations

from normcheck.audit.mutants.kernel import HALF, ZERO_CENTERED, Kernel, full_tiles, rounded, truncated
from normcheck.audit.mutants.mutant import UNWRITTEN, Mutant, Y, implementations, mutant

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        id="mA01",
        what="1 + w is rounded to the io dtype in forward",
        source="linkedin/Liger-Kernel#1462, NVIDIA/TransformerEngine#1690",
        kernel=Kernel(gamma=lambda c: rounded(1 + c.w, c.io)),
        ops=ZERO_CENTERED,
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="mA01b",
        what="1 + w is rounded to the io dtype in backward",
        source="NVIDIA/TransformerEngine#1690",
        kernel=Kernel(gamma_b=lambda c: rounded(1 + c.w, c.io)),
        ops=ZERO_CENTERED,
        dtypes=HALF,
        outputs=("dx",),
    ),
    mutant(
        id="mA02",
        what="gamma is w instead of 1 + w in forward",
        source="linkedin/Liger-Kernel#74",
        kernel=Kernel(gamma=lambda c: c.w),
        ops=ZERO_CENTERED,
        outputs=("y",),
    ),
    mutant(
        id="mA03",
        what="xhat is rounded to the io dtype before it is multiplied by gamma",
        source="flagos-ai/FlagGems#5009",
        kernel=Kernel(xhat=lambda c: rounded(c.xc * c.r, c.io)),
        dtypes=HALF,
        outputs=("y", "bitmask"),
    ),
    mutant(
        id="mA04",
        what="the bias is dropped",
        source="invented",
        kernel=Kernel(preact=lambda c: c.xh * c.g),
        outputs=Y,
        when="with a bias",
    ),
    mutant(
        id="mA05",
        what="(xhat + bias) * gamma",
        source="invented",
        kernel=Kernel(preact=lambda c: c.plus_b(c.xh) * c.g),
        outputs=Y,
        when="with a bias",
    ),
    mutant(
        id="mA06",
        what="every column is multiplied by the first gamma",
        source="deepspeedai/DeepSpeed#692",
        kernel=Kernel(gamma=lambda c: c.one_plus(c.w)[:1].expand(c.N)),
        outputs=Y,
    ),
    mutant(
        id="mA07",
        what="gamma is taken one column to the left",
        source="invented",
        kernel=Kernel(gamma=lambda c: c.one_plus(c.w).roll(1)),
        outputs=Y,
    ),
    mutant(
        id="mA08",
        what="the store of y truncates",
        source="ROCm/aiter#5151",
        kernel=Kernel(store=lambda c, t, dtype, name: truncated(t, dtype) if name == "y" else t.to(dtype)),
        dtypes=HALF,
        outputs=("y",),
    ),
    mutant(
        id="mA09",
        what="gamma is applied twice",
        source="huggingface/pytorch-image-models#2741",
        kernel=Kernel(preact=lambda c: c.plus_b(c.xh * c.g * c.g)),
        outputs=Y,
    ),
    mutant(
        id="mA10",
        what="the bias is taken one column to the left",
        source="microsoft/onnxruntime#28424",
        kernel=Kernel(preact=lambda c: c.xh * c.g + (0 if c.b is None else c.b.roll(1))),
        outputs=Y,
        when="with a bias",
    ),
    mutant(
        id="mR01",
        what="the rows of y in a last tile that is not full are not written",
        source="pytorch/pytorch#184826",
        kernel=Kernel(store=lambda c, t, dtype, name: full_tiles(t.to(dtype)) if name == "y" else t.to(dtype)),
        outputs=("y",),
        kinds=UNWRITTEN,
        when="M is not a multiple of 8",
    ),
)

IMPLEMENTATIONS = implementations(MUTANTS)
