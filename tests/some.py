"""``some``: what a test loops over, if all that it asserts stands in that loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def some(things: Iterable[T]) -> list[T]:
    """``things`` as a list. Fails if there are none: a test that never enters its loop checks nothing."""
    found = list(things)
    assert found, "expected something to loop over"
    return found
