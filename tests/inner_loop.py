"""A table of cases of which the inner loop runs the first ones, and the whole suite all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def parametrize(names: str | tuple[str, ...], table: Iterable[Any], *, inner: int, **more: Any) -> pytest.MarkDecorator:
    """As ``pytest.mark.parametrize``; all but the first ``inner`` rows of the table are slow.

    For a test whose rows take long together, each of which says nearly the same of the code.
    """
    table = list(table)
    assert inner < len(table), f"{names}: inner={inner}: expected fewer than the {len(table)} rows of the table"
    several = not isinstance(names, str) or "," in names
    return pytest.mark.parametrize(
        names, [_row(row, several, slow=number >= inner) for number, row in enumerate(table)], **more
    )


def _row(row: Any, several: bool, *, slow: bool) -> Any:
    if not slow:
        return row
    if isinstance(row, ParameterSet):
        return row._replace(marks=(*row.marks, pytest.mark.slow))
    return pytest.param(*(row if several else (row,)), marks=pytest.mark.slow)
