"""The reports of a comparison: a block for each op and dtype in the terminal, and JSON, ``normcheck-compare/1``.

Keys of the JSON are only ever added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console

from normcheck.compare.results import (
    DIFFER,
    ERROR,
    OUTSIDE,
    SAME,
    SKIP,
    Compared,
    OutputPair,
    Pair,
    PairInContext,
    Rounding,
    Side,
)
from normcheck.reports._cells import name_of
from normcheck.reports._failure import kind_words, put_failure
from normcheck.reports._text import STATUS_STYLES, compact, counted, most_ulps, percent, put, put_lines, ratio, short
from normcheck.reports.document import plain, text_of

SCHEMA = "normcheck-compare/1"

_INDENT = 8
_MARKS = {
    SAME: ("same", STATUS_STYLES["pass"]),
    DIFFER: ("differ", STATUS_STYLES["skip"]),
    OUTSIDE: ("outside", STATUS_STYLES["fail"]),
    SKIP: ("skip", STATUS_STYLES["skip"]),
    ERROR: ("error", STATUS_STYLES["error"]),
}


def write_json(done: Compared, stream: TextIO) -> None:
    """Write ``done`` as one JSON object and a newline."""
    a, b = done.environments
    head = {"schema": SCHEMA, "normcheck": a.get("normcheck", "unknown")}
    sides = {"a": {"spec": done.specs[0], "interpreter": "", "environment": a}}
    sides["b"] = {"spec": done.specs[1], "interpreter": done.interpreter, "environment": b}
    rest = {name: value for name, value in plain(done).items() if name not in ("specs", "interpreter", "environments")}
    stream.write(text_of({**head, "argv": rest.pop("argv"), **sides, **rest}))


def render(done: Compared, console: Console, trouble: Sequence[str] = ()) -> None:
    """Print the two sides, a block for each pair, why something is outside, and one line that sums up.

    ``trouble``: why reports could not be written.
    """
    for label, spec, python in zip("AB", done.specs, ("", done.interpreter), strict=True):
        put(console, f"{label}  ", (short(spec), "bold"), f"  with {short(python, 200)}" if python else "", wrap=False)
    for fact, (was, now) in done.facts.items():
        put(console, f"{short(fact, 40)}: {short(was, 60) or 'none'} -> {short(now, 60) or 'none'}", indent=3, hang=4)
    for pair in done.pairs:
        _put_pair(console, pair)
    for pair in done.pairs:
        for label, side in (("A", pair.a), ("B", pair.b)):
            if side.failure is not None:
                put(console, "")
                put_failure(console, f"{label}, {name_of(pair.key(side))}", side.failure)
    for line in trouble:
        put_lines(console, line)
    put(console, "")
    _put_environment(console, done)
    _put_summary(console, done)


def _put_pair(console: Console, pair: Pair) -> None:
    mark, style = _MARKS[pair.status]
    name, cases = short(pair.name, 200), f"  {counted(pair.cases, 'case')}" if pair.cases else ""
    put(console, (f"{mark:<{_INDENT}}", style), f"{name}{cases}", hang=_INDENT)
    if pair.detail:
        put_lines(console, pair.detail, indent=_INDENT, style="dim")
    for output in pair.outputs:
        if output.differing:
            put(console, _words(output), indent=_INDENT, hang=2)
            if errors := _error_words(output):
                put(console, errors, indent=_INDENT + 2, hang=2)
            put(console, (output.case, "dim"), indent=_INDENT + 2, wrap=False)
        if output.signs:
            zeros = f"{short(output.output, 20)}: {counted(output.signs, 'zero')} of the other sign"
            put(console, zeros, indent=_INDENT, hang=2)
    if same := [output for output in pair.outputs if not (output.differing or output.signs)]:
        put(console, _same_words(same), indent=_INDENT, hang=2)
    if pair.unlike:
        put(
            console, f"{', '.join(pair.unlike)}: of another dtype or size, so not the same bits", indent=_INDENT, hang=2
        )
    for label, side in (("A", pair.a), ("B", pair.b)):
        if side.outside:
            put(console, f"{label} is outside its bound, or fails, in {counted(side.outside, 'case')}", indent=_INDENT)
        if side.refused and pair.cases:
            count, why = sum(side.refused.values()), "; ".join(side.refused)
            put(console, (f"{label} does not take {counted(count, 'case')}: {short(why, 300)}", "dim"), indent=_INDENT)
    for note in pair.notes:
        put_lines(console, note, indent=_INDENT, style="dim")
    if pair.rounding is not None:
        _put_rounding(console, pair.rounding)
    for one in pair.contexts:
        _put_context(console, one)
    for line in pair.reproduce:
        put(console, "Reproduce: ", line, indent=_INDENT, wrap=False)


def _put_context(console: Console, one: PairInContext) -> None:
    said = {SAME: "the same bits", DIFFER: short(one.detail, 400), SKIP: f"not tried: {short(one.detail, 300)}"}
    put(console, f"in the context {one.context}: {said[one.status]}", indent=_INDENT, hang=2)
    if one.status == DIFFER and one.case:
        put(console, (one.case, "dim"), indent=_INDENT + 2, wrap=False)


def _put_rounding(console: Console, found: Rounding) -> None:
    """Print which rounding differs, with the smallest case that shows it, or that none explains it."""
    if not found.axis:
        words = f"No known rounding explains the {counted(found.differing, 'case')}"
        if found.several:
            words = f"No one rounding explains it: {' and '.join(found.several)} differ together"
        put(console, words, indent=_INDENT, hang=2)
        return
    words = f"{found.axis}: A {found.a}; B {found.b}"
    if not found.named:
        count = counted(found.differing - found.explained - found.backward, "case")
        put(console, f"No known rounding explains {count}, such as", indent=_INDENT, hang=2)
        put(console, found.other, indent=_INDENT + 2, wrap=False)
        words = f"{counted(found.explained, 'other case')} by the {words}"
    put(console, f"Rounding: {words}" if found.named else words, indent=_INDENT, hang=2)
    put(console, f"shown by {found.case}", indent=_INDENT + 2, wrap=False)
    if found.backward:
        where = f"in {counted(found.backward, 'case')} gradients alone differ, also where this does not move them"
        put(console, where, indent=_INDENT + 2, hang=2)


def _words(output: OutputPair) -> str:
    """``y: differs in 31% of elements, by at most 1 ulp; both inside the bound (0.61 and 0.74 of it); B is nearer``."""
    unit = "bits" if output.ulps is None else "elements"
    most = "" if output.ulps is None else f", {most_ulps(output.ulps, 'by at most')}"
    if output.of_bound is not None and output.ulps is not None:
        most += f" and {ratio(output.of_bound)} of the bound"
    differs = f"{short(output.output, 20)}: differs in {percent(output.differing, output.elements)} of {unit}{most}"
    return f"{differs}{_bound_words(output.a.ratio, output.b.ratio)}{_nearer(output)}"


def _same_words(outputs: Sequence[OutputPair]) -> str:
    """``mean, rstd: the same bits; inside the bound (at most 0.28 of it)``, of outputs that do not differ."""
    names = ", ".join(short(output.output, 20) for output in outputs)
    ratios = [value for output in outputs for value in (output.a.ratio, output.b.ratio) if value is not None]
    most = max(ratios, default=0.0, key=lambda value: (not value <= 1, value))
    where = "inside" if most <= 1 else "outside"
    return (
        f"{names}: the same bits; {where} the bound (at most {ratio(most)} of it)" if ratios else f"{names}: the same"
    )


def _bound_words(a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return ""
    inside = [value <= 1 for value in (a, b)]
    numbers = ratio(a) if a == b else f"{ratio(a)} and {ratio(b)}"
    if all(inside):
        return f"; both inside the bound ({numbers} of it)"
    if not any(inside):
        return f"; both outside the bound ({numbers} of it)"
    who, other = "AB" if inside[1] else "BA"
    return f"; {who} is outside the bound, {other} inside ({numbers} of it)"


def _nearer(output: OutputPair) -> str:
    a, b = output.a.nearer, output.b.nearer
    if output.a.mean_abs is None:
        return ""
    if a == b:
        return "; neither is nearer to fp64" if not a else "; A and B are nearer to fp64 equally often"
    who, more = ("A", a) if a > b else ("B", b)
    return f"; {who} is nearer to fp64 in {percent(more, output.differing)} of those that differ"


def _error_words(output: OutputPair) -> str:
    """The mean error of both over the bound; "" if fp64 has no single right value."""
    a, b = output.a.mean_ratio, output.b.mean_ratio
    if output.ulps is None or a is None or b is None:
        return ""
    return f"mean error against fp64, of the bound: A {compact(a)}, B {compact(b)}"


def _put_environment(console: Console, done: Compared) -> None:
    facts = ", ".join(f"{short(name, 40)} {short(value, 60)}" for name, value in done.environments[0].items())
    other = "; B has its own, as above" if done.facts else ""
    put(console, (f"{short(done.profile)} profile, seed {done.seed}; {facts}{other}", "dim"), hang=2)


def _put_summary(console: Console, done: Compared) -> None:
    """Print one line, which is enough by itself."""
    some = done.compared
    count = f"{counted(len(some), 'cell')}, {counted(sum(pair.cases for pair in some), 'case')}"
    wrong = [f"{label} ({_first(pair, side)})" for pair in some for label, side in _outside(pair)]
    errors = sum(pair.status == ERROR for pair in done.pairs)
    if not done.complete:
        mark, style, words = "INTERRUPTED", "bold yellow", f"{count} until then"
    elif wrong:
        mark, style, words = "OUTSIDE", "bold red", f"{'; '.join(wrong[:3])}{'; ...' * (len(wrong) > 3)}"
    elif errors:
        mark, style, words = (
            "ERROR",
            STATUS_STYLES["error"],
            f"{counted(errors, 'cell')} could not be compared; {count}",
        )
    elif not some:
        mark, style, words = "NOTHING COMPARED", "bold yellow", "no case that both take; the lines above say why"
    else:
        moved = [output for pair in some for output in pair.outputs if output.differing or output.signs]
        other = [short(name, 20) for pair in some for name in pair.unlike]
        other += [f"what {one.context} returns" for pair in some for one in pair.contexts if one.status == DIFFER]
        mark, style = ("DIFFER", "bold yellow") if moved or other else ("SAME", "bold green")
        names = ", ".join(dict.fromkeys([*(short(output.output, 20) for output in moved), *other]))
        largest = max((output.of_bound or 0.0 for output in moved), default=0.0)
        most = f", by at most {ratio(largest)} of the bound" if largest else ""
        words = (
            f"{count}: {f'{names} not the same{most}; ' if names else 'the same bits; '}both are inside their bounds"
        )
    put(console, (mark, style), f"  {words}", wrap=False)


def _outside(pair: Pair) -> list[tuple[str, Side]]:
    return [(label, side) for label, side in (("A", pair.a), ("B", pair.b)) if side.outside]


def _first(pair: Pair, side: Side) -> str:
    what = "" if side.failure is None else f": {kind_words(side.failure)}"
    return f"{name_of(pair.key(side))}{what}"
