"""A JSON report -> the Run that it was written of: ``read(write(run)) == run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from normcheck.reports.document import Node, load
from normcheck.reports.json import SCHEMA
from normcheck.result import KINDS, Coverage, Finding, Run, Steadiness, Uncheckable, Vacuity, Verdict, Where, Worst

T = TypeVar("T")


def read(file: str) -> Run:
    """The run in a report. Raises UsageError for a file that is none. Keys of later versions are ignored."""
    report = load(file, SCHEMA)
    return Run(
        argv=report["argv"].texts(),
        seed=report["seed"].whole(),
        profile=report["profile"].text(),
        seconds=report["seconds"].number(),
        environment={name: value.text() for name, value in report["environment"].entries().items()},
        verdicts=tuple(_verdict(cell) for cell in report["verdicts"].items()),
        status=report["status"].text(("pass", "fail", "error", "nothing")),
        exit_code=report["exit_code"].integer(),
        messages=report.get("messages", []).texts(),
        complete=report.get("complete", True).flag(),
        budget={name: value.number() for name, value in report.get("budget", {}).entries().items()},
        shard=report.get("shard", "").text(),
        required=report.get("required", []).texts(),
        part=report.get("part", False).flag(),
    )


def _verdict(cell: Node) -> Verdict:
    return Verdict(
        op=cell["op"].text(),
        implementation=cell["implementation"].text(),
        dtype=cell["dtype"].text(),
        device=cell["device"].text(),
        status=cell["status"].text(("pass", "thin", "fail", "skip", "error")),
        detail=cell["detail"].text(),
        cases=cell["cases"].integer(),
        seconds=cell["seconds"].number(),
        worst=_each(cell["worst"], _worst),
        not_returned=cell["not_returned"].texts(),
        failure=_maybe(cell["failure"], _finding),
        uncheckable=_each(cell.get("uncheckable", {}), _uncheckable),
        skipped=_each(cell.get("skipped", {}), Node.integer),
        model=_each(cell.get("model", {}), Node.text),
        notes=cell.get("notes", []).texts(),
        vacuity=_each(cell.get("vacuity", {}), _vacuity),
        repeats=_each(cell.get("repeats", {}), _steadiness),
        invariance=_each(cell.get("invariance", {}), _steadiness),
        known=cell.get("known", "").text(),
        file=cell.get("file", "").text(),
        line=_maybe(cell.get("line", None), Node.integer),
        failed_at=_maybe(cell.get("failed_at", None), lambda node: node.integer(-1)),
        backward_refused=_each(cell.get("backward_refused", {}), Node.integer),
        undeclared=_each(cell.get("undeclared", {}), _worst),
        core=_maybe(cell.get("core", None), _core),
    )


def _core(node: Node) -> Coverage:
    return Coverage(
        planned=node["planned"].integer(),
        run=node["run"].integer(),
        missed=node["missed"].texts(),
        left_out=node["left_out"].text(),
        refused=node["refused"].number(),
        building=node["building"].number(),
    )


def _each(node: Node, read_: Callable[[Node], T]) -> dict[str, T]:
    return {name: read_(value) for name, value in node.entries().items()}


def _maybe(node: Node, read_: Callable[[Node], T]) -> T | None:
    return read_(node) if node.known else None


def _worst(node: Node) -> Worst:
    numbers = {name: node[name].number() for name in ("ratio", "max_abs", "max_ulp")}
    return Worst(**numbers, case=node["case"].text())


def _uncheckable(node: Node) -> Uncheckable:
    return Uncheckable(count=node["count"].integer(), total=node["total"].integer())


def _vacuity(node: Node) -> Vacuity:
    return Vacuity(**{name: node[name].integer() for name in ("zeros", "total", "empty", "checks")})


def _steadiness(node: Node) -> Steadiness:
    return Steadiness(differ=node["differ"].integer(), cases=node["cases"].integer())


def _finding(node: Node) -> Finding:
    return Finding(
        kind=node["kind"].text(KINDS),
        output=node["output"].text(),
        case=node["case"].text(),
        message=node["message"].text(),
        reproduce=node["reproduce"].text(),
        index=_maybe(node["index"], lambda index: tuple(i.integer() for i in index.items())),
        actual=_maybe(node["actual"], Node.number),
        expected=_maybe(node["expected"], Node.number),
        error=_maybe(node["error"], Node.number),
        bound=_maybe(node["bound"], Node.number),
        ratio=_maybe(node["ratio"], Node.number),
        max_ulp=_maybe(node["max_ulp"], Node.number),
        mismatched=_maybe(node["mismatched"], Node.integer),
        numel=_maybe(node["numel"], Node.integer),
        check=node.get("check", "").text(),
        terms=tuple((term["name"].text(), term["value"].number()) for term in node.get("terms", []).items()),
        where=_maybe(node.get("where", None), _where),
        also=node.get("also", []).texts(),
        advice=node.get("advice", "").text(),
        line=_maybe(node.get("line", None), Node.integer),
        traceback=node.get("traceback", []).texts(),
        cause=node.get("cause", "").text(),
    )


def _where(node: Node) -> Where:
    return Where(
        rows=node["rows"].integer(),
        columns=node["columns"].integer(),
        grid=tuple(tuple(share.number() for share in row.items()) for row in node["grid"].items()),
        summary=node["summary"].text(),
    )
