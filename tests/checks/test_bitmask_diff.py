"""A wrong bitmask is told by its bytes, by the order of its bits and by the limit that z is near."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.bitmask_diff import _limits, bit_diff
from normcheck.checks.cell import Cell
from normcheck.checks.check import check
from normcheck.checks.finding import finding
from normcheck.impls import discovery
from normcheck.oracle import bitmask
from normcheck.oracle.compare import Element
from normcheck.oracle.judge import Judge, judge_of
from normcheck.oracle.tolerances import table
from normcheck.result import Finding

OP = OPS["layernorm_relu_bitmask"]
LINE = "layernorm_relu_bitmask fp32 M=5 N=27 rows=normal seed=3 lower_clip=-0.5 upper_clip=0.75"


def found(change: Callable[[Tensor], Tensor], line: str = LINE) -> Finding:
    """The finding of a kernel whose bool mask (M, N) goes through ``change``."""
    (right,) = (i for i in discovery.implementations()["torch"] if i.op == OP.name)

    def forward(x: Tensor, weight: Tensor, bias: Tensor, **options: float) -> dict[str, Tensor]:
        returned = dict(right.forward(x, weight, bias, **options))
        mask = returned["bitmask"]
        mask = mask if mask.dtype == torch.bool else bitmask.unpack(mask, x.shape[1])
        return {**returned, "bitmask": change(mask)}

    wrong = replace(right, name="wrong", forward=forward)
    result = check(wrong, OP, parsed(line), "cpu")
    return finding(Cell(OP, wrong, "fp32", "wrong"), result, "cpu")


def most_significant_first(mask: Tensor) -> Tensor:
    packed = bitmask.pack(mask)
    return sum((((packed >> i) & 1) << (7 - i)).to(torch.uint8) for i in range(8))  # type: ignore[return-value]


def flipped(mask: Tensor, row: int, column: int) -> Tensor:
    mask = mask.clone()
    mask[row, column] = ~mask[row, column]
    return mask


def judge_for(line: str) -> Judge:
    case = parsed(line)
    return judge_of(OP, case, make(case, OP, "cpu"), table().model, {})


def z_of(line: str) -> Tensor:
    judge = judge_for(line)
    return torch.cat([judge.truth(block).forward.z for block in judge.blocks()])


def test_the_other_order_of_bits() -> None:
    told = found(most_significant_first)
    assert told.output == "bitmask"
    assert "All bits are right if they are read most significant bit first." in told.advice
    got, expected = told.advice.partition("got ")[2].split(", expected ")
    assert expected.partition("(")[2].startswith(got)  # what it gave is what the other order would be


@pytest.mark.parametrize("packed", [True, False])
def test_inverted_bits(packed: bool) -> None:
    told = found(lambda mask: bitmask.pack(~mask) if packed else ~mask)
    assert "All bits are right if they are inverted." in told.advice


@pytest.mark.parametrize(("upper", "bit"), [(-8, True), (9, False)])
def test_a_few_bits_say_nothing_of_their_order(upper: int, bit: bool) -> None:
    """As of a wrong limit, shrunk: pad bits are zeros, and one bit alone is right when it is inverted."""
    line = f"layernorm_relu_bitmask fp32 M=1 N=1 seed=3 lower_clip=-9 upper_clip={upper}"
    assert "All bits are right" not in found(lambda mask: bitmask.pack(torch.full_like(mask, bit)), line).advice


def test_a_few_bits_in_the_other_order() -> None:
    line = "layernorm_relu_bitmask fp32 M=1 N=1 seed=3 lower_clip=-9 upper_clip=9"
    assert "All bits are right if they are read most significant" in found(most_significant_first, line).advice


def test_a_single_bit_and_its_byte() -> None:
    told = found(lambda mask: bitmask.pack(flipped(mask, 3, 10)))
    assert told.index == (3, 10)
    assert (told.error, told.max_ulp, told.bound) == (1, 1, 0)
    assert "row 3, bytes 0 to 2, the bit is number 2 of byte 1: got " in told.advice
    got, expected = told.advice.partition("got ")[2].split(" least significant")[0].split(", expected ")
    first, second = ([int(byte, 16) for byte in text.split()] for text in (got, expected))
    assert [a ^ b for a, b in zip(first, second, strict=True)] == [0, 1 << 2, 0]
    assert "The other order of bits does not fit either: " in told.advice
    assert "z at [3, 10] is " in told.advice
    assert "_clip=" in told.advice


def test_the_last_byte_of_a_row() -> None:
    told = found(lambda mask: bitmask.pack(flipped(mask, 0, 26)))
    assert "bytes 2 to 3, the bit is number 2 of byte 3" in told.advice


def test_a_row_of_one_byte() -> None:
    told = found(lambda mask: bitmask.pack(flipped(mask, 2, 4)), LINE.replace("N=27", "N=7"))
    assert "row 2, byte 0, the bit is number 4 of byte 0: got " in told.advice


def test_the_nearer_limit_and_its_side() -> None:
    """A kernel that takes z >= lower_clip + 0.1 for its limit: the bits that it misses lie just above lower_clip."""
    line = LINE.replace("M=5", "M=40")
    z = z_of(line)
    told = found(lambda mask: mask & (z > -0.4), line)
    assert " above lower_clip=-0.5, " in told.advice
    assert "times what a correct z may be off before its store" in told.advice


def test_what_is_said_of_a_limit() -> None:
    judge = judge_for(LINE)
    assert "z at [0, 4] is upper_clip=0.75 itself, exactly: " in _limits(judge, 0.75, 0.0, (0, 4))
    assert "0.25 below upper_clip=0.75, 500 times" in _limits(judge, 0.5, 5e-4, (0, 4))
    assert _limits(judge, -1.0, 0.0, (0, 4)).endswith("0.5 below lower_clip=-0.5")
    assert _limits(judge, float("nan"), 0.0, (0, 4)) == "z at [0, 4] is NaN, which lies between no limits: 0"


def test_a_mask_of_bools_has_bytes_too() -> None:
    told = found(lambda mask: flipped(mask, 1, 1))
    assert "row 1, bytes 0 to 1, the bit is number 1 of byte 0" in told.advice
    assert "order of bits does not fit" not in told.advice


def test_without_the_mask_itself() -> None:
    """A recorded run is judged without what the kernel returned: what z says is told all the same."""
    worst = Element((3, 10), 1.0, 0.0, 1.0, 1.0, 0.0, ())
    told = bit_diff(OP, parsed(LINE), table().model, None, worst, "cpu")
    assert told.startswith("z at [3, 10] is ")
    assert "\n" not in told
