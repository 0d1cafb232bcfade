"""Picture of where an output is wrong: rows down, columns across, a darker cell has more wrong elements."""

from __future__ import annotations

import math
from itertools import groupby

from normcheck.reports._text import Part
from normcheck.result import Where

RIGHT = "."
BLOCKS = "░▒▓█"
ASCII = ":+*#"
TICK = 12
"""Cells from one column number of the ruler to the next."""


def picture(where: Where, *, blocks: bool) -> list[list[Part]]:
    """The lines of the picture, as parts to print: a ruler of columns, the rows with their numbers, and a legend.

    ``blocks``: draw with block characters, else with ASCII.
    """
    if not where.grid or not where.grid[0]:
        return []
    shades = BLOCKS if blocks else ASCII
    vector = len(where.grid) == 1 and where.rows == 1
    labels = [""] if vector else [span(i, len(where.grid), where.rows) for i in range(len(where.grid))]
    title = "column" if vector else "row\\col"
    gutter = max(len(title), *(len(label) for label in labels))
    drawn = ["".join(shade(share, shades) for share in row) for row in where.grid]
    lines: list[list[Part]] = [[(f"{title:>{gutter}} {ruler(len(where.grid[0]), where.columns)}", "dim")]]
    for label, row in zip(labels, drawn, strict=True):
        lines.append([(f"{label:>{gutter}} ", "dim"), *_painted(row)])
    used = legend("".join(drawn), shades)
    return [*lines, [(" " * (gutter + 1) + used, "dim")]] if used else lines


def shade(share: float, shades: str) -> str:
    """The character for a share of wrong elements: one is enough to show, and only a share of 1 is the darkest."""
    if math.isnan(share):
        return "?"
    if share <= 0:
        return RIGHT
    if share >= 1:
        return shades[3]
    return shades[0] if share <= 0.25 else shades[1] if share <= 0.5 else shades[2]


def legend(drawn: str, shades: str) -> str:
    """What the shades in ``drawn`` mean; "" if every cell is all right or all wrong."""
    if not any(character in drawn for character in shades[:3]):
        return ""
    meanings = zip(RIGHT + shades, ("right", "up to 25% wrong", "up to 50%", "more", "all"), strict=True)
    return "  ".join(f"{character} {meaning}" for character, meaning in meanings if character in drawn)


def span(index: int, parts: int, size: int) -> str:
    """The rows in grid row ``index`` of ``parts``: ``7``, or ``16-31``. ``size``: the number of rows in all."""
    first = first_of(index, parts, size)
    last = max(first_of(index + 1, parts, size) - 1, first)
    return str(first) if first == last else f"{first}-{last}"


def first_of(cell: int, cells: int, size: int) -> int:
    """The first of ``size`` elements in ``cell`` of ``cells``, where element i lies in cell ``i * cells // size``."""
    return -(-cell * size // cells)


def ruler(cells: int, columns: int) -> str:
    """Column numbers above their cells: the first, one every TICK cells, and the last."""
    last = str(max(columns - 1, 0))
    if cells < 3:
        return last if columns < 2 else f"0-{last}"  # two numbers side by side would read as one
    start = max(cells - len(last), 0)
    line = ""
    for cell in range(0, cells, TICK):
        label = str(first_of(cell, cells, columns))
        if len(line) <= cell and cell + len(label) < start:
            line = line.ljust(cell) + label
    return line.ljust(start) + last


def _painted(row: str) -> list[Part]:
    return [("".join(run), "dim" if right else "red") for right, run in groupby(row, key=lambda c: c == RIGHT)]
