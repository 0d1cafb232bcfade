"""The plan of a bench, from its options: the points of a suite, and the cells that compute them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from normcheck.bench.options import BenchOptions
from normcheck.bench.suites import SIZES, SUITES, Suite, suite_of
from normcheck.cases.case import MAX_ELEMENTS
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, one_line, one_of
from normcheck.impls import discovery


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


def suite_for(options: BenchOptions, device: str) -> Suite:
    """The suite that the options name, or one of their sizes, ops and dtypes. Raises UsageError."""
    ops = OPS
    if not options.suite:
        chosen = tuple(dict.fromkeys(options.op)) or tuple(ops)
        sizes = sizes_of(options.sizes) or SIZES[device]
        return suite_of([ops[name] for name in chosen], tuple(dict.fromkeys(options.dtype)) or ("bf16",), sizes)
    suite = SUITES[options.suite]
    if options.sizes:
        raise UsageError(f"sizes={options.sizes[0]}: expected none with suite={suite.name}, which has its own")
    for option, given, own in (
        ("op", options.op, {point.op for point in suite.points}),
        ("dtype", options.dtype, {point.dtype for point in suite.points}),
    ):
        for name in given:
            if name not in own:
                raise UsageError(f"{option}={name}: expected {one_of(sorted(own))} with suite={suite.name}")
    return suite


def cells_of(options: BenchOptions, suite: Suite, device: str) -> dict[tuple[str, str], list[Cell]]:
    """(op, dtype) -> the cells that compute it: without ``--impl`` those that are checked by default on ``device``.

    Raises UsageError if a named implementation has none of the ops.
    """
    ops = tuple(dict.fromkeys(point.op for point in suite.points))
    asked = dict.fromkeys(options.impl, ops) or discovery.by_default(device, ops)
    chosen = [(spec, i) for spec, own in asked.items() for i in discovery.select(spec, own)]
    return {
        (op, dtype): [Cell(OPS[op], i, dtype, spec) for spec, i in chosen if i.op == op]
        for op, dtype in dict.fromkeys((point.op, point.dtype) for point in suite.points)
    }
