"""The kernels that a cell launched, in words: by the sizes on which they depend, and what changed between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from normcheck.circumstances import Ran
from normcheck.reports._text import short

_DIRECTIONS = ("forward", "backward")
_MOST = 3


def lines(ran: Sequence[Ran]) -> list[str]:
    """What ran in forward and in backward: ``forward: N <= 1024: rms_small; N >= 2048: rms_tiled, 2 launches``."""
    found = [f"{way}: {_by_size(ran, way)}" for way in _DIRECTIONS if any(getattr(each, way) for each in ran)]
    return found + compiling(ran)


def changing(ran: Sequence[Ran]) -> list[str]:
    """The ``lines`` of what is not the same for all sizes."""
    differing = [way for way in _DIRECTIONS if len({getattr(each, way) for each in ran}) > 1]
    return [f"{way}: {_by_size(ran, way)}" for way in differing] + compiling(ran)


def compiling(ran: Sequence[Ran]) -> list[str]:
    """That a kernel is compiled or tuned for each M, if it was for all that were new."""
    new = [(each.M, each.built) for each in ran if each.built is not None]
    if len(new) < 2 or not all(built for _, built in new):
        return []
    sizes = ", ".join(f"{m:,}" for m, _ in new)
    return [f"compiles for each M: {sum(built or 0 for _, built in new):,} for {len(new)} new ones ({sizes})"]


def changes(before: Sequence[Ran], now: Sequence[Ran]) -> list[str]:
    """What is launched otherwise now, of the sizes that both have: ``forward: rms_small -> rms_tiled (M=3 N=129)``."""
    then = {(each.M, each.N): each for each in before}
    found: dict[str, list[str]] = {}
    for each in now:
        old = then.get((each.M, each.N))
        for way in _DIRECTIONS if old is not None else ():
            names, others = getattr(old, way), getattr(each, way)
            if names != others:
                words = f"{way}: {_shown(names)} -> {_shown(others)}"
                found.setdefault(words, []).append(f"M={each.M} N={each.N}")
    return [f"{words} ({_few(sizes)})" for words, sizes in found.items()]


def _few(sizes: Sequence[str]) -> str:
    return ", ".join(sizes[:_MOST]) + f" and {len(sizes) - _MOST} more" * (len(sizes) > _MOST)


def _by_size(ran: Sequence[Ran], way: str) -> str:
    """The kernels of one direction, by N if they depend on it alone, else by M, else case by case."""
    if len({getattr(each, way) for each in ran}) == 1:
        return _shown(getattr(ran[0], way))
    for axis in ("N", "M"):
        values: dict[int, set[tuple[str, ...]]] = {}
        for each in ran:
            values.setdefault(getattr(each, axis), set()).add(getattr(each, way))
        if all(len(names) == 1 for names in values.values()):
            return "; ".join(_ranges(axis, {value: names.pop() for value, names in values.items()}))
    by_case = sorted(ran, key=lambda each: (each.N, each.M))
    return "; ".join(f"M={each.M} N={each.N}: {_shown(getattr(each, way))}" for each in by_case)


def _ranges(axis: str, names: dict[int, tuple[str, ...]]) -> Iterator[str]:
    """``N <= 1024: a``, ``1500 <= N <= 4096: b``, ``N >= 8192: c``: the sizes that were seen."""
    runs = [(own, [value for value, _ in run]) for own, run in groupby(sorted(names.items()), key=lambda item: item[1])]
    for number, (own, values) in enumerate(runs):
        least, most = values[0], values[-1]
        if number == 0:
            where = f"{axis} <= {most}"
        elif number == len(runs) - 1:
            where = f"{axis} >= {least}"
        else:
            where = f"{axis} = {least}" if least == most else f"{least} <= {axis} <= {most}"
        yield f"{where}: {_shown(own)}"


def _shown(names: Sequence[str]) -> str:
    """``rms_fwd, 2 launches + reduce``: what ran, each once, in the order of the first launches."""
    counts = {name: names.count(name) for name in names}
    each = (f"{short(name)}{f', {count} launches' if count > 1 else ''}" for name, count in counts.items())
    return " + ".join(each) or "no kernel"
