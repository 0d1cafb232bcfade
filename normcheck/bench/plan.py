"""What a bench was asked to measure, checked: the points of a suite, and who computes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from normcheck.bench.suites import SIZES, SUITES, Suite, suite_of
from normcheck.cases.case import MAX_ELEMENTS
from normcheck.cases.dtypes import DTYPES
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, one_line, one_of
from normcheck.impls import discovery


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The options of ``normcheck bench``, as they were given."""

    ops: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    suite: str = ""
    sizes: tuple[str, ...] = ()
    device: str = "auto"
    time_budget: float | None = None
    timeout: float = 120.0
    reports: tuple[str, ...] = ()


def sizes_of(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """``4096,1024`` -> (4096, 1024), each M,N. Raises UsageError."""
    sizes = []
    for text in texts:
        match = re.fullmatch(r"([1-9][0-9]{0,11}),([1-9][0-9]{0,11})", text)
        if match is None or int(match[1]) * int(match[2]) > MAX_ELEMENTS:
            raise UsageError(
                f"sizes={one_line(text, 60)}: expected M,N of integers >= 1, at most {MAX_ELEMENTS} elements"
            )
        sizes.append((int(match[1]), int(match[2])))
    return tuple(sizes)


def suite_for(request: BenchRequest, device: str) -> Suite:
    """The suite that is asked for by name, or one of sizes, ops and dtypes."""
    ops = discovery.ops()
    for option, given, known in (("op", request.ops, tuple(ops)), ("dtype", request.dtypes, DTYPES)):
        for name in given:
            if name not in known:
                raise UsageError(f"{option}={name}: expected {one_of(known)}")
    if not request.suite:
        chosen = tuple(dict.fromkeys(request.ops)) or tuple(ops)
        sizes = sizes_of(request.sizes) or SIZES[device]
        return suite_of([ops[name] for name in chosen], tuple(dict.fromkeys(request.dtypes)) or ("bf16",), sizes)
    if request.suite not in SUITES:
        raise UsageError(f"suite={one_line(request.suite, 60)}: expected {one_of(SUITES)}")
    suite = SUITES[request.suite]
    if request.sizes:
        raise UsageError(f"sizes={request.sizes[0]}: expected none with suite={suite.name}, which has its own")
    for option, given, own in (
        ("op", request.ops, {point.op for point in suite.points}),
        ("dtype", request.dtypes, {point.dtype for point in suite.points}),
    ):
        for name in given:
            if name not in own:
                raise UsageError(f"{option}={name}: expected {one_of(sorted(own))} with suite={suite.name}")
    return suite


def cells_of(request: BenchRequest, suite: Suite) -> dict[tuple[str, str], list[Cell]]:
    """(op, dtype) -> the cells that compute it. An implementation that is named has to have one of the ops."""
    ops = tuple(dict.fromkeys(point.op for point in suite.points))
    if request.impls:
        found = [(spec, i) for spec in dict.fromkeys(request.impls) for i in discovery.select(spec, ops)]
    else:
        found = [(name, i) for name, own in discovery.implementations().items() for i in own if i.op in ops]
    ways: dict[tuple[str, str], list[Cell]] = {}
    for point in suite.points:
        if (point.op, point.dtype) not in ways:
            cells = [Cell(discovery.ops()[i.op], i, point.dtype, spec) for spec, i in found if i.op == point.op]
            ways[point.op, point.dtype] = cells
    return ways
