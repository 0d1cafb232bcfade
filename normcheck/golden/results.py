"""The results of verifying and comparing records, as plain data for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from normcheck.result import CellKey, SweepResult


@dataclass(frozen=True, kw_only=True)
class VerifiedRecord:
    """A record judged again, with ``checks`` checks. ``recorded``: the machine and the versions that it comes from."""

    folder: str
    recorded: Mapping[str, str]
    checks: int
    run: SweepResult


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One output of a cell that moved: ``elements`` of ``total``, in ``cases`` cases.

    ``ulps``: the largest distance in ulps of the output's dtype, infinite between a number and a NaN, None for a
    bitmask. ``case``: the case that has it.
    """

    output: str
    elements: int
    total: int
    cases: int
    ulps: float | None
    case: str


@dataclass(frozen=True, kw_only=True)
class CellChange:
    """Two records of a cell compared. ``cases``: the number of cases in both.

    ``notes``: differences that are not in values, such as a case that only one of them refused.
    """

    key: CellKey
    cases: int
    moved: tuple[Moved, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two records compared. ``facts``: name -> the two versions or devices, if they differ; "" if one is unknown.

    ``only``: for each record, cell -> the number of cases that the other record lacks.
    """

    folders: tuple[str, str]
    facts: Mapping[str, tuple[str, str]]
    cells: tuple[CellChange, ...]
    only: tuple[Mapping[CellKey, int], Mapping[CellKey, int]]

    @property
    def cases(self) -> int:
        """The number of cases in both."""
        return sum(cell.cases for cell in self.cells)

    @property
    def changed(self) -> bool:
        """Whether anything but the versions differs."""
        return any(self.only) or any(cell.moved or cell.notes for cell in self.cells)
