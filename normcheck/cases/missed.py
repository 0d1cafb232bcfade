"""The goals of a core that no case reached, in words: "no M above 8", "no N of 64 to 1023"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from normcheck.cases.axes import BANDS_END, NO_END, OCTAVES, ROWS_OF_CLASS, WIDTHS, Pair, Value, key_of

_MOST_NAMED = 6
"""How many values of one axis are named; the others are counted."""

_PLAIN = (
    "layout", "rows", "dy", "special", "weight", "weights", "weight_dtype", "bias", "eps", "clips", "residual",
    "residual_dtype", "scale", "gate", "samples", "channels", "groups", "head", "kv_heads", "rotary", "angles",
    "probe",
)  # fmt: skip


def in_words(left: Iterable[Value | Pair]) -> tuple[str, ...]:
    """The goals that are ``left``, in words: sizes first, then other values, then the number of pairs."""
    goals = list(left)
    values: dict[str, list[Any]] = {}
    for goal in goals:
        if len(goal) == 2:
            values.setdefault(goal[0], []).append(goal[1])
    words = [*_classes("M", _ROWS, values.get("m", [])), *_columns(values)]
    words += [f"no {axis} {_listed(map(_shown, values[axis]))}" for axis in _PLAIN if axis in values]
    if "empty" in values and 0 not in values.get("m", []):
        words.append(f"no M of 0 with {_listed(_shown_of(*value) for value in values['empty'])}")
    columns = {*values.get("N", []), *values.get("whole", [])}
    exact = [f"M={size}" for size in sorted(values.get("M", []))] + [f"N={size}" for size in sorted(columns)]
    if exact and not words:
        words.append(f"not {_listed(exact)}")
    alone = set(values.get("several", [])).difference(values.get("N", []))
    if alone and not words:
        words.append(f"no M above 1 at {_listed(f'N={n}' for n in sorted(alone))}")
    if "band" in values and not words:
        words += _classes("M", {1: 1, 2: 8, 9: BANDS_END}, values["band"])
    if "shape" in values:
        words.append(f"not {_listed([f'{m}x{n}' for m, n in values['shape']])}")
    pairs = sum(len(goal) == 3 for goal in goals)
    if pairs:
        words.append(f"{pairs} pairs of values that belong together")
    return tuple(words)


def _columns(values: dict[str, list[Any]]) -> list[str]:
    """The widths of which N of every fit are missing, then the missing widths and octaves of one fit."""
    whole, keys = values.get("width", []), values.get("n", [])
    words = _classes("N", _WIDTHS, whole)
    fits = [fit for fit in values.get("fit", []) if fit not in {own for _, own in keys}]
    words += [f"no N that is {fit}" for fit in fits]
    words += [_of_fit(low, _WIDTHS[low], fit) for low, fit in sorted(keys) if low not in whole]
    octaves = sorted(octave for octave in values.get("octave", []) if key_of(OCTAVES[octave][0]) not in keys)
    longest = max(high for high, _ in OCTAVES)
    return [*words, *(_of_fit(high // 2 + 1, NO_END if high == longest else high, fit) for high, fit in octaves)]


def _of_fit(low: int, high: int, fit: str) -> str:
    return f"no N {_range(low, high)} that is {fit}"


def _ends(lows: Iterable[int]) -> Mapping[int, int]:
    """The smallest size of each class -> its largest."""
    every = sorted(lows)
    return dict(zip(every, [*(low - 1 for low in every[1:]), NO_END], strict=True))


_ROWS, _WIDTHS = _ends(ROWS_OF_CLASS), _ends(WIDTHS)


def _classes(axis: str, ends: Mapping[int, int], missing: Sequence[int]) -> list[str]:
    """The ``missing`` classes, by their smallest sizes; neighbouring ones are one range."""
    words: list[str] = []
    start = None
    for (low, high), after in zip(ends.items(), [*list(ends)[1:], None], strict=True):
        if low not in missing:
            continue
        start = low if start is None else start
        if after is None or after not in missing:
            words.append(f"no {axis} {_range(start, high)}")
            start = None
    return words


def _range(low: int, high: int) -> str:
    if low == high:
        return f"of {low}"
    return f"above {low - 1}" if high == NO_END else f"of {low} to {high}"


def _listed(words: Iterable[str]) -> str:
    every = sorted(words)
    more = len(every) - _MOST_NAMED
    return ", ".join(every[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shown_of(axis: str, value: Any) -> str:
    if axis != "n":
        return f"{axis} {_shown(value)}"
    low, fit = value
    return f"N {_range(low, _WIDTHS[low])} that is {fit}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "none"
    return f"{value[0]:g} to {value[1]:g}" if isinstance(value, tuple) else f"{value}"
