"""SARIF report for code scanning: a rule per kind of finding, a result per failed cell at the implementation's line.

The format is SARIF 2.1.0: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
No library writes it, since sarif-om is not maintained; the tests validate these plain objects against the schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import TextIO
from urllib.parse import quote

from normcheck.errors import visible
from normcheck.reports import _plain_text
from normcheck.reports._cells import name_of
from normcheck.reports._failure import TITLES
from normcheck.reports._plain_text import block, is_known, kind, messages, outcome, place, reason
from normcheck.reports._text import short
from normcheck.reports.document import plain as json_value
from normcheck.reports.report import Report
from normcheck.result import KINDS, Finding, SweepResult, Verdict

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "SRCROOT"
"""SARIF's usual name for the folder to which paths are relative."""

Json = dict[str, object]


def write(run: SweepResult, stream: TextIO) -> None:
    """Write ``run`` as one JSON object and a newline, in ASCII."""
    stream.write(json.dumps(document(run), indent=2, allow_nan=False) + "\n")


def document(run: SweepResult) -> Json:
    """``run`` as a SARIF log."""
    failed = [verdict for verdict in run.verdicts if verdict.status == "fail"]
    rules = list(dict.fromkeys((*KINDS, *map(kind, failed))))
    driver: Json = {"name": "normcheck", "rules": [_rule(name) for name in rules]}
    version = _plain_text.environment(run).get("normcheck")
    if version:
        driver["version"] = version
    sarif_run: Json = {
        "tool": {"driver": driver},
        "invocations": [_invocation(run)],
        "columnKind": "unicodeCodePoints",
        "results": [_result(verdict, rules.index(kind(verdict))) for verdict in failed],
        "properties": {"seed": run.seed, "profile": short(run.profile), "environment": _plain_text.environment(run)},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [sarif_run]}


def plain(text: str) -> str:
    """Text as a SARIF message: doubled braces and no ``[text](link)``, which a viewer would take for markup."""
    return text.replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _rule(name: str) -> Json:
    title = TITLES.get(name, name.replace("_", " ")).replace("{output}", "an output")
    text = {"text": plain(f"The implementation {title}." if "output" not in title else f"{title.capitalize()}.")}
    rule: Json = {"id": name, "shortDescription": text, "defaultConfiguration": {"level": "error"}}
    return {**rule, "help": {"text": f"normcheck explain {name}"}} if name in KINDS else rule


def _invocation(run: SweepResult) -> Json:
    """The run itself; cells that were skipped, thin or not judged are its notifications, and so are messages."""
    notes = [_notification("error", f"{name_of(v.key)}: {reason(v)}", v) for v in _of(run, "error")]
    notes += [_notification("note", f"not run: {name_of(v.key)}: {reason(v)}", v) for v in _of(run, "skip")]
    notes += [_notification("warning", f"{name_of(v.key)}: {reason(v)}", v) for v in _of(run, "thin")]
    level = "warning" if run.status == "pass" else "error"
    notes += [_notification(level, line, None) for line in messages(run)]
    return {
        "executionSuccessful": run.complete and run.status != "error",
        "exitCode": run.exit_code,
        "exitCodeDescription": outcome(run),
        "arguments": [short(word, 500) for word in run.argv],
        "toolExecutionNotifications": notes,
    }


def _of(run: SweepResult, status: str) -> list[Verdict]:
    return [verdict for verdict in run.verdicts if verdict.status == status]


def _notification(level: str, text: str, verdict: Verdict | None) -> Json:
    locations = [] if verdict is None else _locations(verdict)
    return {"level": level, "message": {"text": plain(text)}, "locations": locations}


def _result(verdict: Verdict, rule: int) -> Json:
    finding = verdict.failure
    result: Json = {
        "ruleId": kind(verdict),
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": plain(f"{name_of(verdict.key)}: {reason(verdict)}\n\n{block(verdict)}")},
        "locations": _locations(verdict),
        "partialFingerprints": {"normcheckCell/v1": f"{name_of(verdict.key)} {_what(finding)}"},
    }
    if is_known(verdict):
        result["suppressions"] = [{"kind": "external"}]
    if finding is not None:
        result["properties"] = _numbers(finding)
    return result


def _what(finding: Finding | None) -> str:
    return "" if finding is None else short(f"{finding.kind} {finding.output} {finding.check}")


def _numbers(finding: Finding) -> Mapping[str, object]:
    """The facts of a result that a script needs."""
    return {
        "case": short(finding.case, 1000),
        "reproduce": short(finding.reproduce, 2000),
        "output": short(finding.output),
        "ratio": json_value(finding.ratio),
        "error": json_value(finding.error),
        "bound": json_value(finding.bound),
    }


def _locations(verdict: Verdict) -> list[Json]:
    """The place of the implementation: the name of its cell, and its file and line if known."""
    name = {"fullyQualifiedName": "/".join(name_of(verdict.key).split()), "kind": "function"}
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
