"""What of a core was not reached, in words that fit in a line: "no M above 8", "no N of 64 to 1023"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from normcheck.cases.axes import COLUMN_CLASSES, NO_END, ROW_CLASSES, Pair, SizeClass, Value

_NAMED = 6
"""Values of one axis that are named; beyond that they are counted."""

_PLAIN = ("layout", "rows", "dy", "special", "weights", "weight_dtype", "bias", "eps", "clips", "probe")


def in_words(left: Iterable[Value | Pair]) -> tuple[str, ...]:
    """What is said of the goals that are ``left``: sizes first, then other values, then how many pairs of values."""
    goals = list(left)
    values: dict[str, list[object]] = {}
    for goal in goals:
        if len(goal) == 2:
            values.setdefault(goal[0], []).append(goal[1])
    words = [*_sizes("M", ROW_CLASSES, values.get("m", [])), *_columns(values)]
    for axis in _PLAIN:
        missing = sorted(map(_shown, values.get(axis, [])))
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            words.append(f"no {axis} {', '.join(missing[:_NAMED])}{more}")
    exact = [f"{axis}={size}" for axis in ("M", "N") for size in sorted(values.get(axis, []), key=repr)]
    if exact and not words:
        words.append(f"not {', '.join(exact[:_NAMED])}" + (" ..." if len(exact) > _NAMED else ""))
    shapes = [f"{m}x{n}" for m, n in values.get("shape", [])]  # type: ignore[misc]
    if shapes:
        words.append(
            f"not {', '.join(shapes[:_NAMED])}" + (f" and {len(shapes) - _NAMED} more" * (len(shapes) > _NAMED))
        )
    pairs = sum(len(goal) == 3 for goal in goals)
    if pairs:
        words.append(f"{pairs} pairs of values that belong together")
    return tuple(words)


def _columns(values: dict[str, list[object]]) -> list[str]:
    """Classes of N that are missing whole, then those of one fit."""
    whole = set(values.get("width", []))
    words = _sizes("N", COLUMN_CLASSES, list(whole))
    parts = sorted(key for key in values.get("n", []) if key[0] not in whole)  # type: ignore[index, type-var]
    for low, fit in parts:  # type: ignore[misc]
        high = next(c.high for c in COLUMN_CLASSES if c.low == low)
        words.append(f"no N {_range(low, high)} that is {fit}")
    return words


def _sizes(axis: str, classes: Sequence[SizeClass], missing: Sequence[object]) -> list[str]:
    """Neighbouring classes that are missing, as one range each."""
    lows = sorted({c.low: c.high for c in classes}.items())
    words, start = [], None
    for i, (low, high) in enumerate(lows):
        if low in missing and start is None:
            start = low
        last = i + 1 == len(lows) or lows[i + 1][0] not in missing
        if start is not None and low in missing and last:
            words.append(f"no {axis} {_range(start, high if any(c.low > high for c in classes) else NO_END)}")
            start = None
    return words


def _range(low: int, high: int) -> str:
    if low == high:
        return f"of {low}"
    return f"above {low - 1}" if high == NO_END else f"of {low} to {high}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "none"
    return f"{value[0]:g} to {value[1]:g}" if isinstance(value, tuple) else f"{value}"
