"""The goals of a core that no case reached, in words: "no M above 8", "no N of 64 to 1023"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from normcheck.cases.axes import BANDS_END, NO_END, OCTAVES, ROWS_OF_CLASS, WIDTHS, Pair, Value, key_of

_MOST_NAMED = 6
"""How many values of one axis are named; the others are counted."""

_OF_SIZES = {"M", "N", "m", "n", "width", "fit", "whole", "band", "octave", "several", "shape", "empty"}
"""The axes that have words of their own; a value of another is named as it is."""


def in_words(left: Iterable[Value | Pair]) -> tuple[str, ...]:
    """The goals that are ``left``, in words: sizes first, then other values, then the number of pairs."""
    values: dict[str, list[Any]] = defaultdict(list)
    pairs = 0
    for goal in left:
        pairs += len(goal) == 3
        if len(goal) == 2:
            values[goal[0]].append(goal[1])
    words = [*_classes("M", _ROWS, values["m"]), *_columns(values)]
    words += [f"no {axis} {_listed(map(_shown, values[axis]))}" for axis in sorted({*values} - _OF_SIZES)]
    if values["empty"] and 0 not in values["m"]:
        words.append(f"no M of 0 with {_listed(_shown_of(*value) for value in values['empty'])}")
    if not words:  # then single sizes, of which there are many, have some too
        exact = [f"M={m}" for m in sorted(values["M"])] + [f"N={n}" for n in sorted({*values["N"], *values["whole"]})]
        alone = [f"N={n}" for n in sorted({*values["several"]} - {*values["N"]})]
        words = [f"not {_listed(exact)}"] * bool(exact) or [f"no M above 1 at {_listed(alone)}"] * bool(alone)
        words = words or _classes("M", {1: 1, 2: 8, 9: BANDS_END}, values["band"])
    words += [f"not {_listed(f'{m}x{n}' for m, n in values['shape'])}"] * bool(values["shape"])
    return (*words, *[f"{pairs} pairs of values that belong together"] * bool(pairs))


def _columns(values: Mapping[str, list[Any]]) -> Iterator[str]:
    """The widths of which N of every fit are missing, then the missing widths and octaves of one fit."""
    whole, keys = values["width"], values["n"]
    yield from _classes("N", _WIDTHS, whole)
    yield from (f"no N that is {fit}" for fit in values["fit"] if fit not in {own for _, own in keys})
    yield from (_of_fit(low, _WIDTHS[low], fit) for low, fit in sorted(keys) if low not in whole)
    longest = max(high for high, _ in OCTAVES)
    for high, fit in sorted(octave for octave in values["octave"] if key_of(OCTAVES[octave][0]) not in keys):
        yield _of_fit(high // 2 + 1, NO_END if high == longest else high, fit)


def _of_fit(low: int, high: int, fit: str) -> str:
    return f"no N {_range(low, high)} that is {fit}"


def _ends(lows: Iterable[int]) -> Mapping[int, int]:
    """The smallest size of each class -> its largest."""
    return {low: after - 1 for low, after in pairwise((*sorted(lows), NO_END + 1))}


_ROWS, _WIDTHS = _ends(ROWS_OF_CLASS), _ends(WIDTHS)


def _classes(axis: str, ends: Mapping[int, int], missing: Sequence[int]) -> list[str]:
    """The ``missing`` classes, by their smallest sizes; neighbouring ones are one range."""
    ranges: list[tuple[int, int]] = []
    for low, high in ends.items():
        if low in missing:
            joins = bool(ranges) and ranges[-1][1] == low - 1
            ranges[-1:] = [(ranges[-1][0], high)] if joins else [*ranges[-1:], (low, high)]
    return [f"no {axis} {_range(*own)}" for own in ranges]


def _range(low: int, high: int) -> str:
    if low == high:
        return f"of {low}"
    return f"above {low - 1}" if high == NO_END else f"of {low} to {high}"


def _listed(words: Iterable[str]) -> str:
    every = sorted(words)
    more = len(every) - _MOST_NAMED
    return ", ".join(every[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shown_of(axis: str, value: Any) -> str:
    return f"N {_range(value[0], _WIDTHS[value[0]])} that is {value[1]}" if axis == "n" else f"{axis} {_shown(value)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "none"
    return f"{value[0]:g} to {value[1]:g}" if isinstance(value, tuple) else f"{value}"
