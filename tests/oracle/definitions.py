"""What the tests of references share: definitions in exact numbers, central differences, cases in several blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import mpmath
import pytest
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.oracle import judge as judges
from normcheck.oracle.compare import Expectation
from normcheck.oracle.conventions import plainest
from normcheck.oracle.expectations import expectations, whole
from normcheck.oracle.judge import END_TO_END, judge_of
from normcheck.oracle.tolerances import Model
from tests.some import some

Numbers = list[mpmath.mpf]
Convention = tuple[tuple[str, str], ...]
STEP = mpmath.mpf("1e-20")


def exact(t: Tensor | None) -> Numbers:
    assert t is not None
    return [mpmath.mpf(value) for value in t.double().flatten().tolist()]


def rows(numbers: Sequence[mpmath.mpf], columns: int) -> list[Numbers]:
    return [list(numbers[first : first + columns]) for first in range(0, len(numbers), columns)]


def held_of(case: Case, model: Model, inputs: Inputs | None = None) -> Mapping[str, Expectation]:
    """What the outputs of a case, one block, are held against end to end, by name."""
    op = OPS[case.op]
    judge = judge_of(op, case, make(case, op, "cpu") if inputs is None else inputs, model, {})
    return {part.output: part for part in expectations(judge, own_bits=True) if part.check == END_TO_END}


def slopes(leaves: Mapping[str, Numbers], total: Callable[[], mpmath.mpf]) -> dict[str, Numbers]:
    """The central differences of ``total``, which reads ``leaves``, by each of their numbers."""

    def slope(leaf: Numbers, at: int) -> mpmath.mpf:
        ends, value = [], leaf[at]
        for moved in (value + STEP, value - STEP):
            leaf[at] = moved
            ends.append(total())
        leaf[at] = value
        return (ends[0] - ends[1]) / (2 * STEP)

    return {name: [slope(leaf, at) for at in range(len(leaf))] for name, leaf in leaves.items()}


def dot(left: Numbers, right: Numbers) -> mpmath.mpf:
    return sum(a * b for a, b in zip(left, right, strict=True))


def assert_held_to(held: Mapping[str, Expectation], right: Mapping[str, Numbers], least: float = 0.0) -> None:
    """Each value that is expected is the right one, up to a millionth of its bound and ``least``."""
    for name, values in some(right.items()):
        part = held[name]
        limits = part.bound.upper.expand_as(part.expected).flatten().tolist()
        for got, value, limit in zip(exact(part.expected), values, limits, strict=True):
            assert abs(float(got - value)) <= 1e-6 * limit + least, name


def in_blocks(
    case: Case, model: Model, of_block: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, then what one block and what blocks of so many rows give, of each value and each bound of a case."""

    def of_case() -> Mapping[tuple[str, str], tuple[Tensor, ...]]:
        op = OPS[case.op]
        return whole(expectations(judge_of(op, case, make(case, op, "cpu"), model, {})))

    together = of_case()
    with monkeypatch.context() as patch:
        patch.setitem(judges.BLOCK_ELEMENTS, "cpu", of_block * case.N)
        apart = of_case()
    assert together.keys() == apart.keys()
    for (name, _), sides in together.items():
        for one, other in zip(sides, apart[name, _], strict=True):
            yield name, one, other


def assert_tells(case: Case, every: Iterable[Convention], names: Iterable[str]) -> None:
    """``case`` tells apart what conventions say of these names, and nothing else that they say."""
    kept, every = {*names}, [*every]
    said = {tuple(pair for pair in each if pair[0] in kept) for each in every}
    assert len({plainest(each, case) for each in every}) == len(said), case
