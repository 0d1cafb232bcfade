"""Where the wrong elements of an output lie: a small picture and one sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from normcheck.checks.patterns import extent, words_for
from normcheck.result import Where

GRID_ROWS, GRID_COLUMNS = 8, 48
_CHANCE = 1e-6
"""Above it, what wrong elements anywhere at random would leave alone is no pattern."""


def locate(wrong: Tensor) -> Where:
    """``wrong``: bool (rows, columns), True where an element is out of its bound; at least one is."""
    rows, columns = wrong.shape
    return Where(rows=rows, columns=columns, grid=_grid(wrong), summary=_summary(wrong))


def _grid(wrong: Tensor) -> tuple[tuple[float, ...], ...]:
    """Share of wrong elements in each cell of at most GRID_ROWS x GRID_COLUMNS cells."""
    rows, columns = wrong.shape
    down, across = min(rows, GRID_ROWS), min(columns, GRID_COLUMNS)
    row_cell = torch.arange(rows, device=wrong.device) * down // rows
    column_cell = torch.arange(columns, device=wrong.device) * across // columns
    shares = torch.zeros(down, columns, dtype=torch.float64, device=wrong.device)
    shares.index_add_(0, row_cell, wrong.double())
    cells = torch.zeros(down, across, dtype=torch.float64, device=wrong.device)
    cells.index_add_(1, column_cell, shares)
    sizes = row_cell.bincount(minlength=down)[:, None] * column_cell.bincount(minlength=across)[None, :]
    return tuple(tuple(row) for row in (cells / sizes).tolist())


def _summary(wrong: Tensor) -> str:
    """Which rows and columns, and where not all that they have in common is wrong, how much of it."""
    rows, columns = wrong.shape
    if wrong.numel() == 1:
        return "the only element"
    down, across = (wrong.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    by_row, by_column = words_for(down, rows, "row"), words_for(across, columns, "column")
    common, count = len(down) * len(across), int(wrong.sum())
    if rows == 1 or columns == 1:
        return by_column if rows == 1 else by_row
    if count == common:
        if len(down) == rows:
            return "every element" if len(across) == columns else f"{by_column}, in every row"
        if len(across) == columns:
            last = " (the last)" if down == [rows - 1] else ""
            return f"all of row {down[0]} of {rows}{last}" if len(down) == 1 else f"{by_row}, every column"
        return f"{by_row}, {by_column}"
    if _CHANCE < (len(down) / rows) ** count < 1:
        by_row = extent(down, rows, "row")
    if _CHANCE < (len(across) / columns) ** count < 1:
        by_column = extent(across, columns, "column")
    return f"{by_row}, {by_column}: {count:,} of the {common:,} elements in them"
