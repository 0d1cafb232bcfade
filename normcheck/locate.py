"""Where the wrong elements of an output lie: a small picture and one sentence."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from normcheck.result import Where

GRID_ROWS, GRID_COLUMNS = 8, 48


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
    rows, columns = wrong.shape
    parts = []
    if rows > 1:
        parts.append(_indices(wrong.any(1), "row"))
    if columns > 1:
        parts.append(_indices(wrong.any(0), "column"))
    return ", ".join(parts) if parts else "the only element"


def _indices(hit: Tensor, name: str) -> str:
    """The pattern of the True entries, as a person would say it: all, one, a run, a tail, every k-th."""
    total = len(hit)
    at = hit.nonzero().flatten().tolist()
    if len(at) == total:
        return f"every {name}"
    if len(at) == 1:
        last = " (the last)" if at[0] == total - 1 else ""
        return f"only {name} {at[0]} of {total}{last}"
    steps = {b - a for a, b in itertools.pairwise(at)}
    if steps == {1}:
        tail = " (the tail)" if at[-1] == total - 1 else ""
        return f"{name}s {at[0]} to {at[-1]} of {total}{tail}"
    if len(steps) == 1 and len(at) > 2:
        return f"one {name} in {steps.pop()}, from {at[0]}"
    return f"{len(at)} of {total} {name}s, from {at[0]} to {at[-1]}"
