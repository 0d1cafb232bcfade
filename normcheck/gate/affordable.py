"""The extent of a core at what rows and columns cost, and what that leaves out."""

from __future__ import annotations

import math

from normcheck.cases.goals import Extent
from normcheck.gate.costs import Costs

COSTLY_ROW_SECONDS, DEAR_ROW_SECONDS = 1e-4, 6e-4
"""A row that takes longer is costly, or dear. Torch takes some 2e-6, our tiled kernels under the interpreter 2e-4, a
kernel with a program for each row 2e-3 and more."""

COSTLY_COLUMN_SECONDS = 2e-6
"""A column of the widest rows that takes longer is costly: an interpreted kernel that takes a row in small blocks needs
1e-4, one with a whole row in a block less than 2e-6."""


def affordable(usual: Extent, costs: Costs) -> Extent:
    """The ``usual`` extent, or less of it, at what a row and a column cost on a CPU."""
    extent = usual
    if DEAR_ROW_SECONDS < costs.row < math.inf:
        extent = extent.with_dear_rows
    elif COSTLY_ROW_SECONDS < costs.row < math.inf:
        extent = extent.with_costly_rows
    return extent.with_dear_columns if COSTLY_COLUMN_SECONDS < costs.column < math.inf else extent


def left_out(extent: Extent, usual: Extent, costs: Costs) -> str:
    """What ``extent`` has not of the ``usual`` one, and why; "" if nothing."""
    reasons = []
    if extent.rows < usual.rows:
        reasons.append(f"a row costs {costs.row * 1e3:.1f} ms here: no M above {extent.rows} in the core")
    elif extent.paired_rows < usual.paired_rows:
        few = f"M above {extent.paired_rows} in few cases of the core"
        reasons.append(f"a row costs {costs.row * 1e3:.1f} ms here: {few}")
    if extent.fine != usual.fine:
        what = f"no N above {extent.columns} and not every layout and dy in each width"
        reasons.append(f"a column costs {costs.column * 1e3:.2g} ms here: {what} in the core")
    return "; ".join(reasons)
