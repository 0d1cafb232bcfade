"""HTML report: one page to look at, which needs no network and no script, and has the JSON report in it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from normcheck.reports import _text
from normcheck.reports._cells import MARKS, name_of
from normcheck.reports._failure import explanation_words, headline, kind_words
from normcheck.reports._page import NEEDS, put_page
from normcheck.reports._plain_text import block, environment, is_known, messages
from normcheck.reports._ran import lines as lines_of_ran
from normcheck.reports._reasons import case_reasons, reasons
from normcheck.reports._summary import rest, word
from normcheck.reports._svg import INK, LINES, MARKERS, figure, inline, pieces
from normcheck.reports._text import compact, counted, seconds, short
from normcheck.reports.json import document
from normcheck.reports.report import Report
from normcheck.result import OUTPUTS, Finding, SweepResult, Verdict

MOST_FAILURES, MOST_LINES = 40, 8
"""Failures with a section of their own, and implementations with a line in a picture; the others are counted."""

_STEPS = ((0.01, "r0"), (0.1, "r1"), (0.3, "r2"), (0.6, "r3"), (1.0, "r4"), (3.0, "w1"), (30.0, "w2"), (1000.0, "w3"))
_BEYOND = "w4"
"""Error over bound up to which a colour is used, on a scale of its logarithm, and the colour of all above."""

_HEAT_WIDTH = 576  # pixels at most

_MEMORY = ("input_modified", "out_of_bounds_read", "out_of_bounds_write", "unwritten")
_NUMBERS, _KINDS = ("M", "N", "eps"), ("rows", "dy", "layout")
_TITLES = {"M": "M, rows", "N": "N, columns", "eps": "eps", "rows": "kind of x", "dy": "kind of dy", "layout": "layout"}


@dataclass(frozen=True)
class _Field:
    """A field of the matrix: its colour and its text, which begins with a mark."""

    kind: str = ""
    text: str = ""


@dataclass(frozen=True)
class _Row:
    """A row of the matrix. ``link``: the id of the section of its failure, or ""."""

    op: str
    implementation: str
    dtype: str
    status: str
    mark: str
    cases: str
    shapes: str
    link: str
    fields: tuple[_Field, ...]


def write(run: SweepResult, stream: TextIO) -> None:
    """Write the page of ``run``. Raises ModuleNotFoundError if a module of ``_page.NEEDS`` is missing."""
    outputs = [output for output in OUTPUTS if any(output in v.worst or output in v.not_returned for v in run.verdicts)]
    failed = [v for v in run.verdicts if v.status in ("fail", "error")]
    links = {id(v): f"failure-{number}" for number, v in enumerate(failed[:MOST_FAILURES], 1)}
    drift = [line for line in messages(run) if line.startswith("drift from ")]
    put_page(
        stream,
        "reports/templates/verify.html",
        document(run),
        word=word(run),
        status="thin" if word(run) == "THIN" else run.status,
        rest=rest(run),
        messages=[line for line in messages(run) if line not in drift],
        stands_on=_stands_on(run),
        thin=[_thin(v) for v in run.verdicts if v.status == "thin"],
        not_checked=[*_not_checked(run)],
        outputs=outputs,
        keys=_keys(),
        matrix=[_row(v, outputs, links.get(id(v), "")) for v in run.verdicts if v.status != "skip"],
        failures=[_failure(v, links[id(v)]) for v in failed[:MOST_FAILURES]],
        more_failures=_more(failed),
        pictures=[*_pictures(run.verdicts)],
        steadiness=[_steadiness(v) for v in run.verdicts if v.status in ("pass", "thin", "fail") and v.cases],
        elsewhere=[_elsewhere(v) for v in run.verdicts if v.contexts or v.configurations or v.ran],
        drift=drift,
        made=_made(run),
    )


def _more(failed: Sequence[Verdict]) -> str:
    left = len(failed) - MOST_FAILURES
    return f"and {counted(left, 'more failure')}, in the matrix and in the JSON report" if left > 0 else ""


def _stands_on(run: SweepResult) -> list[tuple[str, str]]:
    judged = [v for v in run.verdicts if v.status in ("pass", "thin", "fail")]
    counts = {status: sum(v.status == status for v in run.verdicts) for status in MARKS}
    found = [("cells", ", ".join(f"{count:,} {MARKS[status]}" for status, count in counts.items() if count) or "none")]
    found.append(("cases", f"{sum(v.cases for v in run.verdicts):,} in {seconds(run.seconds)}"))
    if judged:
        least = min(judged, key=lambda v: (v.cases, v.shapes or 0))
        shapes = "" if least.shapes is None else f" on {counted(least.shapes, 'shape')}"
        found.append(("least in a cell", f"{counted(least.cases, 'case')}{shapes}: {name_of(least.key)}"))
    if run.required:
        found.append(("required", ", ".join(map(short, run.required))))
    if not run.complete:
        found.append(("complete", "no: the run was stopped"))
    return found


def _thin(verdict: Verdict) -> tuple[str, ...]:
    shapes = "" if verdict.shapes is None else f"{verdict.shapes:,}"
    return name_of(verdict.key), f"{verdict.cases:,}", shapes, short(verdict.detail, 1000)


def _not_checked(run: SweepResult) -> Iterator[tuple[str, str, str]]:
    for why, cells in reasons(run, "skip").items():
        yield "cells", _names(cells), short(why, 500)
    for why, cells in case_reasons(run).items():
        yield "cases", _names(cells), short(why, 500)
    for verdict in run.verdicts:
        for why, count in verdict.backward_refused.items():
            yield f"gradients of {counted(count, 'case')}", name_of(verdict.key), short(why, 500)
    absent: dict[tuple[str, ...], list[tuple[Verdict, str]]] = {}
    for verdict in run.verdicts:
        if verdict.not_returned and verdict.status != "skip":
            absent.setdefault(verdict.not_returned, []).append((verdict, ""))
    for outputs, cells in absent.items():
        yield ", ".join(map(short, outputs)), _names(cells), "not returned"


def _names(cells: Sequence[tuple[Verdict, str]], most: int = 12) -> str:
    named = "; ".join(f"{name_of(verdict.key)}{count}" for verdict, count in cells[:most])
    return named + (f"; and {len(cells) - most:,} more" if len(cells) > most else "")


def _keys() -> list[tuple[str, str]]:
    right = [(kind, f"up to {limit:g}") for limit, kind in _STEPS if limit <= 1]
    wrong = [(kind, f"wrong, up to {limit:g}") for limit, kind in _STEPS if limit > 1]
    return [*right, *wrong, (_BEYOND, "wrong, above that")]


def _colour(ratio: float) -> str:
    return next((kind for limit, kind in _STEPS if ratio <= limit), _BEYOND)


def _row(verdict: Verdict, outputs: Sequence[str], link: str) -> _Row:
    judged = verdict.status in ("pass", "thin", "fail")
    return _Row(
        op=short(verdict.op),
        implementation=short(verdict.implementation),
        dtype=" ".join(map(short, filter(None, (verdict.dtype, verdict.device)))),
        status="known" if is_known(verdict) else verdict.status,
        mark="known" if is_known(verdict) else MARKS.get(verdict.status, short(verdict.status)),
        cases=f"{verdict.cases:,}" if judged else "",
        shapes=f"{verdict.shapes:,}" if judged and verdict.shapes is not None else "",
        link=link,
        fields=tuple(_field(verdict, output) for output in outputs),
    )


def _field(verdict: Verdict, output: str) -> _Field:
    failure, worst = verdict.failure, verdict.worst.get(output)
    if failure is not None and failure.output == output and failure.kind != "mismatch":
        return _Field(_BEYOND, f"✗ {kind_words(failure).removeprefix(output).strip()}")
    if worst is None:
        return _Field("", "-" if output in verdict.not_returned else "")
    mark = "✓" if worst.ratio <= 1 else "✗"
    return _Field(_colour(worst.ratio), f"{mark} {_text.ratio(worst.ratio)}")


def _failure(verdict: Verdict, link: str) -> dict[str, Any]:
    """The section of a cell that did not pass."""
    found = verdict.failure
    title = headline(found) if found is not None else "not judged"
    facts = [] if found is None else [*_facts(found)]
    place = f"{verdict.file}:{verdict.line}" if verdict.line else verdict.file
    if place:
        facts.append(("file", short(place, 400)))
    if verdict.known:
        facts.append(("known", short(verdict.known, 400)))
    return {
        "id": link,
        "title": f"{name_of(verdict.key)}: {title}",
        "text": block(verdict),
        "facts": facts,
        "heat": _heat(found) if found is not None else None,
        "terms": _terms(found) if found is not None else [],
    }


def _facts(found: Finding) -> Iterator[tuple[str, str]]:
    if found.case:
        yield "smallest case", found.case
    if found.where is not None:
        yield "where", short(found.where.summary, 400)
    if found.larger is not None:
        yield "in a larger case", f"{short(found.larger.where.summary, 400)}: {found.larger.case}"
    if found.cause:
        yield "cause", short(found.cause, 600)
    if found.explanation is not None:
        yield "might be", explanation_words(found.explanation)
    if found.reproduce:
        yield "to paste", found.reproduce


def _heat(found: Finding) -> dict[str, Any] | None:
    """The picture of the largest error over bound in each part of the output; None if it is not known.

    Of the larger case if there is one: it was kept for its pattern.
    """
    where = found.where if found.larger is None else found.larger.where
    lengths = set() if where is None else {len(row) for row in where.ratios}
    if where is None or len(lengths) != 1 or 0 in lengths:  # also a report that somebody edited
        return None
    size = f"{where.rows:,} x {where.columns:,}"
    largest = max(max(row) for row in where.ratios)
    label = (
        f"Error over bound in the {size} elements, rows down, columns across, the largest of each part; "
        f"at most {_text.ratio(largest)}"
    )
    across = len(where.ratios[0])
    rows = pieces([[_colour(ratio) for ratio in row] for row in where.ratios])
    return {
        "label": label,
        "rows": rows,
        "across": across,
        "width": max(12, min(48, _HEAT_WIDTH // across)),
        "height": 18,
    }


def _terms(found: Finding) -> list[dict[str, str]]:
    total = sum(term.value for term in found.terms)
    if not found.terms or not 0 < total < math.inf:
        return []
    return [
        {
            "name": short(term.name, 80),
            "value": compact(term.value),
            "share": f"{term.value / total:.1%}",
            "percent": f"{100 * term.value / total:.1f}",
        }
        for term in found.terms
        if term.value / total >= 0.0005  # it would be 0.0 %
    ]


def _steadiness(verdict: Verdict) -> tuple[str, ...]:
    """What running a case again showed, among other rows as well, and what memory was touched."""

    def said(found: Mapping[str, Any]) -> str:
        cases = max((each.cases for each in found.values()), default=0)
        if not cases:
            return "not tried"
        other = [f"{short(name)} in {each.differ} of {each.cases}" for name, each in found.items() if each.differ]
        return f"other bits: {', '.join(other)}" if other else f"the same bits in {counted(cases, 'case')}"

    failure = verdict.failure
    touched = failure is not None and failure.kind in _MEMORY
    memory = headline(failure) if touched and failure is not None else "nothing but its own"
    return name_of(verdict.key), said(verdict.repeats), said(verdict.invariance), memory


def _elsewhere(verdict: Verdict) -> tuple[str, ...]:
    """How the cell did in each context and with each configuration, and the kernels that ran."""
    contexts = [
        f"{short(name)}: {how.status}" + (f" ({short(how.why, 300)})" if how.why else "")
        for name, how in verdict.contexts.items()
    ]
    found = verdict.configurations
    configurations = [] if found is None else [f"{found.judged} of {found.allowed} judged", short(found.why, 300)]
    if found is not None:
        configurations += [f"{short(name, 300)}: {short(why, 300)}" for name, why in found.cannot.items()]
    columns = contexts, filter(None, configurations), lines_of_ran(verdict.ran)
    return name_of(verdict.key), *("; ".join(column) or "-" for column in columns)


def _made(run: SweepResult) -> list[tuple[str, str]]:
    command = shlex.join(("normcheck", *run.argv))
    facts = [("command", short(command, 2000)), ("profile", short(run.profile)), ("seed", str(run.seed))]
    budget = ", ".join(f"{short(name)} {value:g}" for name, value in run.budget.items())
    facts += [("budget of a cell", budget)] * bool(budget) + [("shard", short(run.shard))] * bool(run.shard)
    return [*facts, *environment(run).items()]


# pictures


def _pictures(verdicts: Sequence[Verdict]) -> Iterator[dict[str, Any]]:
    """For each op, a picture of error over bound along every axis."""
    ops = dict.fromkeys(v.op for v in verdicts if v.spread)
    names = list(dict.fromkeys(v.implementation for v in verdicts if v.spread))
    for number, op in enumerate(ops, 1):
        lines = {name: _largest([v for v in verdicts if (v.op, v.implementation) == (op, name)]) for name in names}
        lines = {name: axes for name, axes in lines.items() if axes}
        left = len(lines) - MOST_LINES
        title = short(op) + (f", the first {MOST_LINES} of {len(lines)} implementations" if left > 0 else "")
        label = f"{title}: error over bound along {', '.join(_TITLES.values())}"
        yield {"title": title, "svg": _drawn(dict([*lines.items()][:MOST_LINES]), names, label, number)}


def _largest(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """Axis -> value -> the largest ratio of these cells."""
    found: dict[str, dict[str, float]] = {}
    for verdict in verdicts:
        for axis, values in verdict.spread.items():
            own = found.setdefault(axis, {})
            for value, ratio in values.items():
                own[value] = max(own.get(value, 0.0), ratio)
    return found


def _drawn(
    lines: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str], label: str, number: int
) -> Any:
    top = 2 * min(
        max([5.0, *(ratio for line in lines.values() for own in line.values() for ratio in own.values())]), _HIGH
    )
    with figure(10.0, 6.5) as drawing:
        for position, axis in enumerate((*_NUMBERS, *_KINDS), 1):
            axes = drawing.add_subplot(2, 3, position)
            values = _ordered({value for line in lines.values() for value in line.get(axis, {})}, axis)
            for name, line in lines.items():
                own = [
                    (i, line[axis][v]) for i, v in enumerate(values) if line.get(axis, {}).get(v)
                ]  # 0: nothing there
                look = names.index(name)
                axes.plot(
                    [i for i, _ in own],
                    [min(max(ratio, _LOW), _HIGH) for _, ratio in own],
                    label=short(name, 40),
                    color=LINES[look % len(LINES)],
                    marker=MARKERS[look // len(LINES) % len(MARKERS)],
                    linestyle="-" if axis in _NUMBERS else "none",
                    markersize=4,
                    linewidth=1.2,
                )
            axes.axhline(1, color=INK, linestyle="--", linewidth=0.8)
            axes.set_yscale("log")
            axes.set_ylim(_LOW, top)
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xticks(
                range(len(values)), [short(value, 14) for value in values], rotation=60, ha="right", fontsize=7
            )
            axes.set_title(_TITLES[axis], fontsize=9)
            if position % 3 == 1:
                axes.set_ylabel("error / bound")
        handles, labels = drawing.axes[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=4)
        return inline(drawing, label, number)


_LOW, _HIGH = 1e-3, 1e6
"""Ratios beyond these are drawn at the edge."""


def _ordered(values: set[str], axis: str) -> list[str]:
    """The values of an axis in their order: sizes and eps by number, kinds by name."""
    if axis not in _NUMBERS:
        return sorted(values)

    def number(value: str) -> float:
        try:
            return float(value)
        except ValueError:  # of a report that somebody edited
            return math.inf

    return sorted(values, key=number)


REPORT = Report(
    name="html", write=write, summary="one page to look at, with pictures and the JSON report in it", needs=NEEDS
)
