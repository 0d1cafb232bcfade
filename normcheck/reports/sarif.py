"""SARIF 2.1.0, for code scanning: a rule per kind of finding, a result per failed cell at the implementation's line.

The format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import TextIO
from urllib.parse import quote

from normcheck.reports import _plain
from normcheck.reports._failure import TITLES
from normcheck.reports._plain import block, cell, is_known, kind, messages, outcome, place, said
from normcheck.reports._strict import number
from normcheck.reports._text import short, visible
from normcheck.reports.report import Report
from normcheck.result import KINDS, Finding, Run, Verdict

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "SRCROOT"
"""What relative paths start from, under SARIF's usual name for it."""

Json = dict[str, object]


def write(run: Run, stream: TextIO) -> None:
    """Write ``run`` as one JSON object and a newline, in ASCII."""
    stream.write(json.dumps(document(run), indent=2, allow_nan=False) + "\n")


def document(run: Run) -> Json:
    """``run`` as a SARIF log."""
    failed = [verdict for verdict in run.verdicts if verdict.status == "fail"]
    rules = list(dict.fromkeys((*KINDS, *map(kind, failed))))
    driver: Json = {"name": "normcheck", "rules": [_rule(name) for name in rules]}
    version = _plain.environment(run).get("normcheck")
    if version:
        driver["version"] = version
    sarif_run: Json = {
        "tool": {"driver": driver},
        "invocations": [_invocation(run)],
        "columnKind": "unicodeCodePoints",
        "results": [_result(verdict, rules.index(kind(verdict))) for verdict in failed],
        "properties": {"seed": run.seed, "profile": short(run.profile), "environment": _plain.environment(run)},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [sarif_run]}


def plain(text: str) -> str:
    """Text as a SARIF message: braces doubled, and no ``[text](link)``, both of which a viewer would take for more."""
    return text.replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _rule(name: str) -> Json:
    title = TITLES.get(name, name.replace("_", " ")).replace("{output}", "an output")
    text = {"text": plain(f"The implementation {title}." if "output" not in title else f"{title.capitalize()}.")}
    return {"id": name, "shortDescription": text, "defaultConfiguration": {"level": "error"}}


def _invocation(run: Run) -> Json:
    """The run itself; cells that were skipped or could not be judged are notifications of it."""
    told = [_notification("error", f"{cell(v)}: {said(v)}", v) for v in run.verdicts if v.status == "error"]
    told += [_notification("note", f"not run: {cell(v)}: {said(v)}", v) for v in run.verdicts if v.status == "skip"]
    told += [_notification("warning", f"thin: {cell(v)}: {said(v)}", v) for v in run.verdicts if v.status == "thin"]
    level = "warning" if run.status == "pass" else "error"
    told += [_notification(level, line, None) for line in messages(run)]
    return {
        "executionSuccessful": run.complete and run.status != "error",
        "exitCode": run.exit_code,
        "exitCodeDescription": outcome(run),
        "arguments": [short(word, 500) for word in run.argv],
        "toolExecutionNotifications": told,
    }


def _notification(level: str, text: str, verdict: Verdict | None) -> Json:
    locations = [] if verdict is None else _locations(verdict)
    return {"level": level, "message": {"text": plain(text)}, "locations": locations}


def _result(verdict: Verdict, rule: int) -> Json:
    finding = verdict.failure
    result: Json = {
        "ruleId": kind(verdict),
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": plain(f"{cell(verdict)}: {said(verdict)}\n\n{block(verdict)}")},
        "locations": _locations(verdict),
        "partialFingerprints": {"normcheckCell/v1": f"{cell(verdict)} {_what(finding)}"},
    }
    if is_known(verdict):
        result["suppressions"] = [{"kind": "external"}]
    if finding is not None:
        result["properties"] = _numbers(finding)
    return result


def _what(finding: Finding | None) -> str:
    return "" if finding is None else short(f"{finding.kind} {finding.output} {finding.check}")


def _numbers(finding: Finding) -> Mapping[str, object]:
    """What a script would ask of a result."""
    return {
        "case": short(finding.case, 1000),
        "reproduce": short(finding.reproduce, 2000),
        "output": short(finding.output),
        "ratio": number(finding.ratio),
        "error": number(finding.error),
        "bound": number(finding.bound),
    }


def _locations(verdict: Verdict) -> list[Json]:
    """Where the implementation is; what its cell is called, where its file is not known."""
    name = {"fullyQualifiedName": "/".join(cell(verdict).split()), "kind": "function"}
    location: Json = {"logicalLocations": [name]}
    file, line = place(verdict)
    if file:
        physical: Json = {"artifactLocation": _artifact(file)}
        if line:
            physical["region"] = {"startLine": line}
        location["physicalLocation"] = physical
    return [location]


def _artifact(file: str) -> Json:
    path = PurePath(file)
    try:
        address = quote(os.fsencode(path.as_posix()))
    except UnicodeEncodeError:  # a name that no file can have
        address = quote(visible(path.as_posix()))
    if path.is_absolute():
        return {"uri": f"file://{address if address.startswith('/') else '/' + address}"}
    return {"uri": address, "uriBaseId": f"%{ROOT}%"}


REPORT = Report(name="sarif", write=write, summary="SARIF 2.1.0, for code scanning")
