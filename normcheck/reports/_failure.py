"""Block of one failure, in the order of torch's messages: how much is wrong, the worst element, its bound, where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from rich.console import Console

from normcheck.errors import cut
from normcheck.reports import _text
from normcheck.reports._picture import picture
from normcheck.reports._text import Part, compact, counted, exact, in_ulps, percent, put, put_lines, short
from normcheck.result import EARLIER_CALLS, LATER_CALLS, OTHER_ROWS, Explanation, Finding, Larger, Where

TITLES = {
    "mismatch": "{output} is wrong",
    "non_finite": "{output} is not finite where it should be",
    "missing": "{output} was not returned",
    "shape": "{output} has the wrong shape",
    "dtype": "{output} has the wrong dtype",
    "unwritten": "{output} was not written everywhere",
    "input_modified": "{output} was modified, and it is an input",
    "out_of_bounds_read": "reads outside its tensors",
    "out_of_bounds_write": "writes outside its tensors",
    "not_repeatable": "{output} is not the same when run again",
    "context": "{output} is wrong in another context",
    "exception": "raised an exception",
    "crash": "crashed its process",
    "timeout": "did not finish in time",
}
"""Kind of a finding -> its headline."""

_NOT_REPEATABLE = {
    OTHER_ROWS: "{output} depends on the other rows",
    EARLIER_CALLS: "{output} depends on earlier calls",
    LATER_CALLS: "{output} is overwritten by a later call",
}
"""Check of a finding that is not repeatable -> its headline."""

TERMS_SHOWN = 4
TRACEBACK_LINES = 10


def put_failure(
    console: Console,
    cell: str,
    finding: Finding,
    *,
    known: str = "",
    others: Mapping[str, Finding] = MappingProxyType({}),
) -> None:
    """Print the block of one failure of ``cell``, such as ``rmsnorm triton bf16``. Its last line is the command.

    ``known``: the reason of a known failure. ``others``: dtype -> the same finding in it, which has a line with what is
    not the same.
    """
    mark: Part = ("KNOWN", "bold yellow") if known else ("FAIL", "bold red")
    put(console, mark, " ", (f"{', '.join((cell, *others))}: {headline(finding)}", "bold"), hang=5)
    put_lines(console, known, indent=2, label="Known: ")
    put_lines(console, finding.cause, indent=2, label="Cause: ", style="bold")
    put_lines(console, finding.configuration, indent=2, label="Configuration: ", style="bold")
    if finding.explanation is not None:
        put_lines(console, explanation_words(finding.explanation), indent=2, label="Might be: ", style="bold")
    if not _says_nothing_new(finding):
        put_lines(console, finding.message, indent=2)
    _put_numbers(console, finding)
    if finding.also:
        put(console, "Also wrong: ", ", ".join(short(output) for output in finding.also), indent=2, hang=4)
    if finding.where is not None:
        put_lines(console, finding.where.summary, indent=2, label="Where: ")
        _put_picture(console, finding.where)
    if finding.larger is not None:
        _put_larger(console, finding.larger)
    _put_traceback(console, finding.traceback)
    put_lines(console, finding.advice, indent=2, label="Advice: ", style="cyan")
    for dtype, other in others.items():
        _put_other(console, dtype, other, finding)
    if finding.case:
        put(console, "Case: ", finding.case, indent=2, wrap=False)
    put(console, "Meaning: ", f"normcheck explain {short(finding.kind)}", wrap=False)
    if finding.explain:
        put(console, "Explain: ", finding.explain, wrap=False)
    if finding.reproduce:
        put(console, "Reproduce: ", (finding.reproduce, "bold"), wrap=False)


def _put_other(console: Console, dtype: str, other: Finding, finding: Finding) -> None:
    """How wrong it is in another dtype, and in which case if that is another one."""
    same = finding.case.split()[2:] == other.case.split()[2:]  # after op and dtype
    words = "; ".join(filter(None, (_times(other.ratio), "" if same else other.reproduce or other.case)))
    if words:
        put(console, f"Also in {dtype}: ", words, indent=2, wrap=False)


def explanation_words(explanation: Explanation) -> str:
    """What the kernel might do, with the evidence."""
    cases = counted(explanation.cases, "case") + (f" of {short(explanation.only)}" if explanation.only else "")
    evidence = f"this predicts all {explanation.elements:,} elements in {cases}"
    return f"{short(explanation.words, 300)}; {evidence}; none of the other {explanation.others:,} known faults does"


def headline(finding: Finding) -> str:
    """``dx is wrong (given the reference's statistics)``."""
    output = short(finding.output)
    if finding.kind == "not_repeatable" and finding.check in _NOT_REPEATABLE:
        return _NOT_REPEATABLE[finding.check].replace("{output}", output or "something")
    if finding.kind == "context" and finding.traceback and not output:
        return f"raises an exception in another context ({short(finding.check)})"
    title = TITLES.get(finding.kind, "{output} " + finding.kind.replace("_", " "))
    words = title.replace("{output}", output or "something").strip()
    extra = [] if "{output}" in title else [output]
    extra = [detail for detail in (*extra, short(finding.check)) if detail]
    return f"{words} ({', '.join(extra)})" if extra else words


def kind_words(finding: Finding) -> str:
    """The kind in a few characters, for one-line summaries: ``dx``, ``y shape``, ``crash``."""
    if finding.kind == "not_repeatable" and finding.check in _NOT_REPEATABLE:
        return headline(finding)
    kind = finding.kind.replace("out_of_bounds", "out-of-bounds").replace("_", " ")
    words = (short(finding.output, 40), "" if finding.kind == "mismatch" and finding.output else kind)
    return " ".join(word for word in words if word)


def _says_nothing_new(finding: Finding) -> bool:
    if finding.mismatched is not None:
        return True  # the numbers follow, one a line
    message = finding.message.strip().rstrip(".")
    return message in headline(finding)


def _put_numbers(console: Console, finding: Finding) -> None:
    if finding.mismatched is not None and finding.numel is not None:
        share = percent(finding.mismatched, finding.numel)
        put(console, f"Mismatched elements: {finding.mismatched:,} / {finding.numel:,} ({share})", indent=2)
    if finding.index is not None:
        put(console, f"Worst element at {_position(finding.index)}: {_times(finding.ratio)}".rstrip(), indent=2)
    finite = finding.error is not None and math.isfinite(finding.error)
    ulp = f", {in_ulps(finding.max_ulp)}" if finite and finding.max_ulp is not None else ""
    numbers: tuple[tuple[str, float | None, list[Part]], ...] = (
        ("got", finding.actual, [exact(finding.actual)]),
        ("expected", finding.expected, [exact(finding.expected)]),
        ("error", finding.error, [compact(finding.error), ulp]),
        ("bound", finding.bound, [compact(finding.bound)]),
        ("ratio", finding.ratio, [(_text.ratio(finding.ratio), "bold red"), " (above 1 is wrong)"]),
    )
    for name, value, parts in numbers:
        if value is not None:
            start = f"{name:<9} "
            more = _packed(console.width - 24, _terms(finding)) if name == "bound" else []
            put(console, start, *parts, *more[:1], indent=4, hang=len(start))
            for line in more[1:]:
                put(console, line, indent=4 + len(start) + len(compact(value)), hang=3)


def _position(index: tuple[int, ...]) -> str:
    return f"index ({', '.join(str(i) for i in index)}{',' if len(index) == 1 else ''})"


def _times(ratio: float | None) -> str:
    if ratio is None or math.isnan(ratio):
        return ""
    if math.isinf(ratio):
        return "wrong beyond any bound"
    return f"{_text.ratio(ratio)} times what is allowed"


def _terms(finding: Finding) -> list[str]:
    """The terms of the bound with their shares, largest first, since that one matters most."""
    terms = [(short(term.name, 40), term.value) for term in finding.terms if term.value]
    total = sum(value for _, value in terms)
    if not terms or not math.isfinite(total):
        return []
    shown = terms if len(terms) <= TERMS_SHOWN + 1 else terms[:TERMS_SHOWN]
    words = [f"{name} {compact(value)} ({value / total:.0%})" for name, value in shown if not _nothing(value, total)]
    rest = terms[len(shown) :]
    if rest and not _nothing(sum(value for _, value in rest), total):
        value = sum(value for _, value in rest)
        words.append(f"{len(rest)} more {compact(value)} ({value / total:.0%})")
    return [f" = {words[0]}", *(f" + {word}" for word in words[1:])]


def _nothing(value: float, total: float) -> bool:
    return value / total < 0.005  # it would be 0 %


def _packed(width: int, words: list[str]) -> list[str]:
    """``words`` on as few lines of ``width`` characters as possible, none of the words broken."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) <= width:
            lines[-1] += word
        else:
            lines.append(word)
    return lines


def _put_larger(console: Console, larger: Larger) -> None:
    """Where a larger case is wrong. If it is all of it, there is nothing to draw."""
    where = larger.where
    size = f"{where.columns:,}" if where.rows == 1 else f"{where.rows:,} x {where.columns:,}"
    put(console, f"Larger case, {size}: {short(where.summary)}", indent=2, hang=4)
    if any(share < 1 for row in where.grid for share in row):
        _put_picture(console, where)
        put(console, ("Case: ", "dim"), (larger.case, "dim"), indent=4, wrap=False)


def _put_picture(console: Console, where: Where) -> None:
    for line in picture(where, blocks=_text.unicode_ok(console)):
        put(console, *line, indent=4, wrap=False)


def _put_traceback(console: Console, traceback: tuple[str, ...]) -> None:
    """The end of a traceback, where the cause is."""
    lines = [line.rstrip() for entry in traceback for line in entry.splitlines() if line.strip()]
    if not lines:
        return
    part = f" (last {TRACEBACK_LINES} of {len(lines)} lines)" if len(lines) > TRACEBACK_LINES else ""
    put(console, f"Traceback{part}:", indent=2)
    for line in lines[-TRACEBACK_LINES:]:
        put(console, (cut(line, 400).expandtabs(4), "dim"), indent=4, hang=4)
