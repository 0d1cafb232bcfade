"""Which rows or columns are hit, as a person would say it, where a simple pattern fits all of them and no other."""

from __future__ import annotations

from collections.abc import Sequence

_FEWEST = 3
"""Repeats from which on a period is one."""

_BLOCKS = tuple(2**k for k in range(3, 15))


def words_for(at: Sequence[int], total: int, name: str) -> str:
    """``at``: the indices that are hit, ascending, at least one, of ``total``; ``name``: row or column."""
    first, last = at[0], at[-1]
    if len(at) == total:
        return f"every {name}"
    if len(at) == 1:
        return f"only {name} {first} of {total}" + (" (the last)" if first == total - 1 else "")
    if len(at) == last - first + 1:
        return _run(first, last, total, name)
    return _periodic(at, total, name) or extent(at, total, name)


def extent(at: Sequence[int], total: int, name: str) -> str:
    """How many of them are hit, and between which: where no pattern fits, or one may be there by chance."""
    return f"{len(at)} of {total} {name}s, from {at[0]} to {at[-1]}"


def _run(first: int, last: int, total: int, name: str) -> str:
    """Neighbours: a head, a tail, or some in between."""
    if last == total - 1:
        return f"only {name}s >= {first} of {total}{_remainder(first, total, name)}"
    if first == 0:
        return f"only {name}s < {last + 1} of {total}"
    return f"only {name}s {first} to {last} of {total}"


def _remainder(first: int, total: int, name: str) -> str:
    """`` = M - M % 16`` where a tail is what a blocked loop leaves over; the smallest block that fits."""
    size = {"row": "M", "column": "N"}[name]
    block = next((b for b in _BLOCKS if total % b == total - first and total > b), None)
    return f" = {size} - {size} % {block}" if block else ""


def _periodic(at: Sequence[int], total: int, name: str) -> str:
    """The same neighbours in every block of one size, and nothing else; "" where that is not so."""
    gap = next((i for i in range(1, len(at)) if at[i] != at[i - 1] + 1), len(at))
    if gap == len(at):
        return ""
    length, period, start = gap, at[gap] - at[0], at[0]
    expected = [i for base in range(start, total, period) for i in range(base, min(base + length, total))]
    if start + length > period or len(range(start, total, period)) < _FEWEST or list(at) != expected:
        return ""
    if length == 1:
        if start == period - 1 and period > 2:
            return f"the last {name} of each {period}"
        return f"every {_ordinal(period)} {name}" + (f", from {start} on" if start else "")
    if start == 0:
        return f"the first {length} {name}s of each {period}"
    if start + length == period:
        return f"the last {length} {name}s of each {period}"
    return f"{name}s {start} to {start + length - 1} of each {period}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
