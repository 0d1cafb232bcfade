"""What verifying and comparing records comes to, as plain data, for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from normcheck.result import Run


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A record judged again. ``recorded``: the machine and the versions that it comes from."""

    folder: str
    recorded: Mapping[str, str]
    checks: int
    run: Run


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One output of a cell that is not the same: ``elements`` of ``total``, in ``cases`` cases.

    ``ulps``: the largest distance in units of the output's dtype, infinite between a number and a NaN, None for bits;
    ``case``: where it is.
    """

    output: str
    elements: int
    total: int
    cases: int
    ulps: float | None
    case: str


@dataclass(frozen=True, kw_only=True)
class CellChange:
    """Two records of a cell. ``cases``: those in both; ``same``: elements with the same bits.

    ``notes``: what else is not the same, such as a case that only one of them refused.
    """

    op: str
    implementation: str
    dtype: str
    cases: int
    same: int
    moved: tuple[Moved, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two records compared. ``facts``: name -> both versions or devices where they differ, "" where it is not known.

    ``only``: for each record the cells with the number of cases that the other does not have.
    """

    folders: tuple[str, str]
    facts: Mapping[str, tuple[str, str]]
    cells: tuple[CellChange, ...]
    only: tuple[Mapping[tuple[str, str, str], int], Mapping[tuple[str, str, str], int]]

    @property
    def cases(self) -> int:
        """How many cases are in both."""
        return sum(cell.cases for cell in self.cells)

    @property
    def changed(self) -> bool:
        """Whether anything at all is not the same; versions aside."""
        return any(self.only) or any(cell.moved or cell.notes for cell in self.cells)
