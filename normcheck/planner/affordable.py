"""The extent of a core at what its rows and columns cost, and what that leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from normcheck.cases.goals import Extent
from normcheck.cases.planned import Planned
from normcheck.planner.own import Own

_SHARE = 0.5
"""The cases of a core may be expected to take this share of its time: what a case costs is the least that was seen."""


def affordable(usual: Extent, own: Own, seconds: float, cases: Callable[[Extent], Iterable[Planned]]) -> Extent:
    """The ``usual`` extent, or a smaller one whose ``cases`` are expected to fit in the ``seconds`` of a core."""
    for extent in _smaller(usual, columns_cost=own.rate("column") > 0):
        left = _SHARE * seconds
        for planned in cases(extent):
            left -= own.seconds(planned, most=True)
            if left < 0:
                break
        else:
            return extent
    return extent


def _smaller(usual: Extent, *, columns_cost: bool) -> Iterable[Extent]:
    """This extent, and smaller ones for a kernel whose rows, columns or both take long."""
    for rows in (usual, usual.with_costly_rows, usual.with_dear_rows):
        yield from (rows, rows.with_dear_columns) if columns_cost else (rows,)


def left_out(extent: Extent, usual: Extent, own: Own) -> str:
    """What ``extent`` has not of the ``usual`` one, and why; "" if nothing."""
    rows, columns = (f"a {unit} costs {own.rate(unit) * 1e3:.2g} ms here" for unit in ("row", "column"))
    parts = []
    if extent.rows < usual.rows:
        parts.append(f"no M above {extent.rows} in the core: {rows}")
    elif extent.paired_rows < usual.paired_rows:
        parts.append(f"M above {extent.paired_rows} in few cases of the core: {rows}")
    if extent.fine != usual.fine:
        what = f"no N above {extent.columns}, and not every layout and dy in each width, in the core"
        parts.append(f"{what}: {columns}")
    return "; ".join(parts)
