"""How far apart the rows, or the samples, of each tensor of a case lie, and how far from an aligned address it begins.

A kernel may take the strides of one tensor for those of another. So by turns of the seed one of them alone lies apart,
or each at a distance of its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from normcheck.cases.case import Case
from normcheck.cases.layouts import EXPANDED, HEADS, SAMPLES_STRIDED
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import COS, GATE, K_WEIGHT, Q_WEIGHT, RESIDUAL, RESIDUAL_GATE, SCALE, SHIFT, SIN

MODULATION = (SCALE, SHIFT, RESIDUAL_GATE)
"""What each sample of a modulated op has of its own: its rows are those of a projection to several such."""

_DEALT = 456
"""A number by which the N of models show whose address is taken for granted beside whose, as the tests ask."""

_SIXTH = 5  # of a projection to six: so many others lie behind each row


def read_by_forward(case: Case) -> tuple[str, ...]:
    """The tensors with rows that a forward of a case reads, x first."""
    op = OPS[case.op]
    beside = [RESIDUAL] * op.adds_residual + [GATE] * op.gated + [SCALE, SHIFT] * op.modulated
    return "x", *beside, *[RESIDUAL_GATE] * op.gates_residual


def cotangents(case: Case) -> tuple[str, ...]:
    """The gradients that a backward of a case gets, dy first."""
    return "dy", *["dresidual_out"] * OPS[case.op].adds_residual


def parameters(case: Case) -> tuple[str, ...]:
    """The tensors that a case has beside those with rows, if they are several."""
    op = OPS[case.op]
    if op.rotary:
        return Q_WEIGHT, K_WEIGHT, COS, SIN
    return ("weight", "bias") if op.takes_bias and True in op.weights_of((True,)) else ()


def misaligned_alone(case: Case) -> str:
    """The tensor that alone is misaligned in a misaligned case; "all", "but x" or "parameters" if others are.

    Which are hangs on N alone, for which a kernel on a GPU is compiled anyway.
    """
    turns = "all", "but x", "parameters", *read_by_forward(case), *cotangents(case), *parameters(case)
    return random.Random(f"{_DEALT} {case.N}").choice(turns)


def shift_of(case: Case, name: str, size: int) -> int:
    """How many elements, of ``size`` bytes, a tensor begins behind an aligned address: one, or 8 bytes. A kernel may
    look at the address of one tensor and take another's for granted.
    """
    if case.layout != "misaligned":
        return 0
    alone, of_rows = misaligned_alone(case), (*read_by_forward(case), *cotangents(case))
    together = {"all": True, "but x": name != "x", "parameters": name not in of_rows}
    return (1 if case.N % 3 else 8 // size) * together.get(alone, name == alone)


def apart(case: Case) -> Mapping[str, int]:
    """The tensors whose rows, or samples, lie apart -> how many gaps follow each."""
    every = *read_by_forward(case), *cotangents(case)
    if case.layout in ("x_strided", "dy_strided"):
        own = read_by_forward(case) if case.layout == "x_strided" else cotangents(case)
        return {own[case.seed % len(own)]: 1}
    if case.layout == "strided":
        return {name: 1 + number * (case.seed % 2) for number, name in enumerate(every)}
    if case.layout in ("rank3_strided", SAMPLES_STRIDED):
        own = tuple(name for name in every if name not in MODULATION)
        turn = case.seed % (2 * len(own))
        return dict.fromkeys(own[turn : turn + 1] or own, 1)
    return {}


def in_channels_last(case: Case) -> tuple[str, ...]:
    """Which of x and dy lie in channels-last memory in that layout: both, or by turns one of them."""
    return (("x", "dy"), ("x",), ("x", "dy"), ("dy",))[case.seed % 4]


def gap_of(case: Case, name: str) -> int:
    """The elements behind each row, or sample, of x, of dy, or of what has their shape."""
    if case.layout == HEADS:
        return case.gaps[name]
    return case.gap * apart(case).get(name, 0)


def expanded(case: Case) -> str:
    """The cotangent whose rows all share one memory, "" if that of none does."""
    own = cotangents(case)
    return own[case.seed % len(own)] if case.layout in EXPANDED else ""


def modulation_stride(case: Case, name: str) -> int:
    """The row stride of one of MODULATION: N if it is packed, else that of a projection to six or more."""
    behind = apart(case).get(name, 0)
    return case.N * (behind + _SIXTH if behind else 1)


def angle_stride(case: Case) -> int:
    """The row stride of cos and sin: that of one half of a cache of both if dy is strided, else they are packed."""
    return case.of_heads.pairs * (2 if case.gaps["dy"] else 1)
