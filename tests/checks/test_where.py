"""Where wrong elements lie, in words: each pattern by its name, and none that may have come by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from normcheck.checks import where
from normcheck.checks.where import GRID_COLUMNS, GRID_ROWS, locate, names_a_pattern
from normcheck.result import three_digits


def wrong(rows: int, columns: int, at: Sequence[int] | slice, *, down: Sequence[int] | slice = slice(None)) -> Tensor:
    """Rows x columns, wrong in the columns ``at`` of the rows ``down``."""
    found = torch.zeros(rows, columns, dtype=torch.bool)
    row = torch.zeros(columns, dtype=torch.bool)
    row[at] = True
    found[down] = row
    return found


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (wrong(1, 1, [0]), "the only element"),
        (wrong(3, 5, slice(None)), "every element"),
        (wrong(1, 129, [128]), "only column 128 of 129 (the last)"),
        (wrong(4, 129, [128]), "only column 128 of 129 (the last), in every row"),
        (wrong(4, 100, slice(50, None)), "only columns >= 50 of 100, in every row"),
        (wrong(4, 1034, slice(1024, None)), "only columns >= 1024 of 1034 = N - N % 16, in every row"),
        (wrong(4, 100, slice(0, 9)), "only columns < 9 of 100, in every row"),
        (wrong(4, 100, slice(20, 31)), "only columns 20 to 30 of 100, in every row"),
        (wrong(4, 64, slice(7, None, 8)), "the last column of each 8, in every row"),
        (wrong(4, 64, slice(0, None, 2)), "every 2nd column, in every row"),
        (wrong(4, 64, slice(3, None, 11)), "every 11th column, from 3 on, in every row"),
        (wrong(4, 64, [i for i in range(64) if i % 16 < 4]), "the first 4 columns of each 16, in every row"),
        (wrong(4, 64, [i for i in range(64) if i % 16 >= 12]), "the last 4 columns of each 16, in every row"),
        (wrong(9, 4, slice(None), down=[8]), "all of row 8 of 9 (the last)"),
        (wrong(9, 4, slice(None), down=[0, 4, 8]), "every 4th row, every column"),
        (wrong(4, 64, [1, 2, 17, 40]), "4 of 64 columns, from 1 to 40, in every row"),
    ],
)
def test_a_pattern_has_its_words(mask: Tensor, words: str) -> None:
    assert locate(mask).summary == words
    assert names_a_pattern(words) == (words not in NO_PATTERN)


def of_heads(tokens: int, heads: int, wrong_at: Sequence[tuple[int, int]]) -> Tensor:
    """Rows of 16 columns, wrong in these heads of these tokens."""
    found = torch.zeros(tokens, heads, 16, dtype=torch.bool)
    for token, head in wrong_at:
        found[token, head] = True
    return found.view(-1, 16)


@pytest.mark.parametrize(
    ("mask", "heads", "words"),
    [
        (of_heads(4, 5, [(t, 4) for t in range(4)]), 5, "only head 4 of 5 (the last), every token, every column"),
        (of_heads(9, 5, [(8, h) for h in range(5)]), 5, "only token 8 of 9 (the last), every column"),
        (of_heads(4, 8, [(t, h) for t in (1, 2, 3) for h in (6, 7)]), 8, "only heads >= 6 of 8, only tokens >= 1 of 4"),
        (of_heads(4, 5, [(t, h) for t in range(4) for h in range(5)]), 5, "every element"),
        (of_heads(4, 5, [(0, 1), (3, 2)]), 5, "2 of 20 rows, from 1 to 17, every column"),
        (of_heads(20, 1, [(19, 0)]), 1, "all of row 19 of 20 (the last)"),
        (of_heads(1, 5, [(0, 4)]), 5, "all of row 4 of 5 (the last)"),
    ],
)
def test_rows_that_are_heads_are_told_as_heads(mask: Tensor, heads: int, words: str) -> None:
    summary = locate(mask, heads=heads).summary
    assert summary.removesuffix(", every column") == words.removesuffix(", every column")
    assert names_a_pattern(summary) == (not words.startswith("2 of"))


NO_PATTERN = ("the only element", "4 of 64 columns, from 1 to 40, in every row")


def test_a_few_elements_anywhere_are_no_pattern() -> None:
    """Two wrong elements leave most rows alone whatever the fault: that names no rows."""
    mask = torch.zeros(20, 30, dtype=torch.bool)
    mask[3, 4] = mask[9, 21] = True
    summary = locate(mask).summary
    assert summary == "2 of 20 rows, from 3 to 9, 2 of 30 columns, from 4 to 21: 2 of the 4 elements in them"
    assert not names_a_pattern(summary)


def test_the_picture_has_the_share_of_each_cell() -> None:
    where = locate(wrong(2 * GRID_ROWS, 2 * GRID_COLUMNS, [0, 1, 2], down=[0]))
    assert (len(where.grid), len(where.grid[0])) == (GRID_ROWS, GRID_COLUMNS)
    assert where.grid[0][:3] == (0.5, 0.25, 0.0)  # cells of 2 x 2
    assert sum(map(sum, where.grid)) == 0.75


def test_each_cell_has_its_largest_ratio() -> None:
    """Parts are those of the picture, and no ratio is rounded across 1."""
    for rows, columns in ((2 * GRID_ROWS + 3, 2 * GRID_COLUMNS + 5), (1, 7), (300, 1), (8, 48)):
        ratios = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) * 3
        found = locate(ratios > 1, ratios)
        down, across = len(found.grid), len(found.grid[0])
        assert (len(found.ratios), len(found.ratios[0])) == (down, across)
        largest = [[0.0] * across for _ in range(down)]
        for row in range(rows):
            for column in range(columns):
                cell = row * down // rows, column * across // columns
                largest[cell[0]][cell[1]] = max(largest[cell[0]][cell[1]], float(ratios[row, column]))
        assert found.ratios == tuple(tuple(map(three_digits, row)) for row in largest)
    assert [three_digits(r) for r in (0.12345, 0.9999, 1.0, 1.00001, 1.0049, 12345.0, math.inf)] == [
        *(0.123, 1.0, 1.0, 1.001, 1.001, 12300.0, math.inf)
    ]
    assert locate(torch.ones(2, 2, dtype=torch.bool)).ratios == ()


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("shape", [(1, 50), (7, 3), (8, 48), (100, 97)])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, block: int, shape: tuple[int, int]) -> None:
    mask = torch.arange(shape[0] * shape[1]).mul(7919).remainder(11).view(shape) < 4
    expected = locate(mask)
    monkeypatch.setattr(where, "BLOCK_ELEMENTS", block)
    assert locate(mask) == expected
    assert where.how_many(mask) == where.how_many(mask.flatten()) == int(mask.sum())
    down, across = min(shape[0], GRID_ROWS), min(shape[1], GRID_COLUMNS)
    assert (len(expected.grid), len(expected.grid[0])) == (down, across)
    cells = [[[] for _ in range(across)] for _ in range(down)]
    for row, values in enumerate(mask.tolist()):
        for column, value in enumerate(values):
            cells[row * down // shape[0]][column * across // shape[1]].append(value)
    assert expected.grid == tuple(tuple(sum(cell) / len(cell) for cell in line) for line in cells)
