"""Explain a wrong bit of a bitmask: its bytes in both bit orders, and the distance of z from the limits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import make
from normcheck.cases.op import Op
from normcheck.oracle import bitmask, reference
from normcheck.oracle.compare import Element
from normcheck.oracle.judge import Judge, judge_of
from normcheck.oracle.judge_forward import bits_of, doubtful_bits
from normcheck.oracle.tolerances import Model

_MOST_FIRST = "if they are read most significant bit first"
_INVERTED = "if they are inverted"


def bit_diff(op: Op, case: Case, model: Model, returned: Tensor | None, worst: Element, device: str) -> str:
    """Lines about the wrong bit ``worst``. ``returned``: the mask as the kernel returned it, None if it is gone."""
    judge = judge_of(op, case, make(case, op, device), model, {})
    row, column = worst.index
    (block,) = (b for b in judge.blocks() if b.start <= row < b.stop)
    truth = judge.truth(block)
    z = truth.forward.z[row - block.start]
    before = truth.y.before_store.expand_as(truth.forward.z)[row - block.start]
    expected = reference.bits(z, judge.options)
    lines = [] if returned is None else [_bytes(returned, case, row, column, expected)]
    lines.append(_limits(judge, float(z[column]), float(before[column]), (row, column)))
    if returned is not None:
        lines += _other_reading(judge, returned)
    return "\n".join(line for line in lines if line)


def _bytes(returned: Tensor, case: Case, row: int, column: int, expected: Tensor) -> str:
    """The byte that holds the bit, and its neighbours: got and expected, in both bit orders."""
    number = column // 8
    first, end = max(number - 1, 0), min(number + 2, bitmask.packed_columns(case.N))
    bits = bits_of(returned, case)[row]
    got, right = (bitmask.pack(b.reshape(1, -1))[0].tolist() for b in (bits, expected))
    if returned.dtype != torch.bool:  # as it was returned, pad bits included
        got = returned.reshape(case.M, -1)[row].tolist()
    which = f"bytes {first} to {end - 1}" if end - first > 1 else f"byte {first}"
    text = (
        f"row {row}, {which}, the bit is number {column % 8} of byte {number}: "
        f"got {_hex(got[first:end])}, expected {_hex(right[first:end])}"
    )
    other = _hex(_reversed(right[first:end]))
    return f"{text} least significant bit first ({other} most significant bit first)"


def _hex(values: list[int]) -> str:
    return " ".join(f"{value:02x}" for value in values)


def _reversed(values: list[int]) -> list[int]:
    """The bytes with their bits in the other order."""
    return [int(f"{value:08b}"[::-1], 2) for value in values]


def _limits(judge: Judge, z: float, before: float, at: tuple[int, int]) -> str:
    """The limit nearer to z and its distance, compared with the error that a correct z may have."""
    name, limit = min(judge.options.items(), key=lambda option: abs(z - option[1]))
    distance = abs(z - limit)
    if math.isnan(z):
        return f"z at {list(at)} is NaN, which lies between no limits: 0"
    if distance == 0:
        return f"z at {list(at)} is {name}={limit:.9g} itself, exactly: lower_clip < z < upper_clip is strict, so 0"
    side = "above" if z > limit else "below"
    rounds = "" if before == 0 else f", {distance / before:.3g} times what a correct z may be off before its store"
    return f"z at {list(at)} is {z:.9g}: {distance:.3g} {side} {name}={limit:.9g}{rounds}"


def _other_reading(judge: Judge, returned: Tensor) -> list[str]:
    """Say which of the other ``_readings`` of the bits makes all of them right, if one does.

    In a case that was shrunk to a few bits nearly every reading does: pad bits are zeros, and a few equal bits may be
    inverted by chance. So a reading counts only if ones are expected, and the inverted one only if zeros are as well.
    """
    readings = _readings(judge.case, returned)
    wrong, ones, zeros = dict.fromkeys(readings, 0), 0, 0
    for block in judge.blocks():
        truth = judge.truth(block)
        certain = ~doubtful_bits(judge, truth)
        right = reference.bits(truth.forward.z, judge.options)
        ones += int((right & certain).sum())
        zeros += int((~right & certain).sum())
        for name, reading in readings.items():
            wrong[name] += int(((reading[block] != right) & certain).sum())
    evidence = {_MOST_FIRST: ones, _INVERTED: min(ones, zeros)}
    fits = [f"All bits are right {name}." for name, count in wrong.items() if count == 0 and evidence[name]]
    if fits or not wrong.get(_MOST_FIRST):
        return fits[:1]
    return [f"The other order of bits does not fit either: {wrong[_MOST_FIRST]:,} bits would be wrong."]


def _readings(case: Case, returned: Tensor) -> dict[str, Tensor]:
    """Each other reading of the mask, in words -> its bits, bool (M, N)."""
    inverted = {_INVERTED: ~bits_of(returned, case)}
    if returned.dtype == torch.bool:
        return inverted
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=returned.device)
    rows = returned.reshape(case.M, bitmask.packed_columns(case.N))
    most_first = ((rows.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : case.N].bool()
    return {_MOST_FIRST: most_first, **inverted}
