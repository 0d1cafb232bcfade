"""JUnit XML, as Jenkins, GitLab and others read it: a suite per op, a test case per cell, and one for the gate itself.

The order and the attributes are those of Ant's schema, the strictest in use. What XML 1.0 has no character for is shown
escaped, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TextIO
from xml.etree import ElementTree as ET

from normcheck.reports._plain import block, cells, environment, is_known, kind, messages, outcome, place, said
from normcheck.reports._text import short
from normcheck.reports.report import Report
from normcheck.result import Run, Verdict

GATE = "normcheck"
"""The suite of what is said of the run as a whole: without it a gate that is red for what did not run looks green."""


def write(run: Run, stream: TextIO) -> None:
    """Write ``run`` in ASCII, so that no encoding of ``stream`` can refuse it."""
    root = ET.Element("testsuites")
    for op in dict.fromkeys(verdict.op for verdict in run.verdicts):
        own = [verdict for verdict in run.verdicts if verdict.op == op]
        cases = [_case(verdict) for verdict in own]
        _add_suite(root, run, short(op) or "-", cases, sum(_finite(v.seconds) for v in own), cells(own))
    _add_suite(root, run, GATE, [_gate(run)], run.seconds, outcome(run))
    ET.indent(root)
    stream.write(ET.tostring(root, encoding="us-ascii", xml_declaration=True).decode("ascii") + "\n")


def _add_suite(root: ET.Element, run: Run, name: str, cases: Sequence[ET.Element], seconds: float, output: str) -> None:
    suite = ET.SubElement(root, "testsuite", name=name, package="normcheck", id=str(len(root)))
    suite.set("timestamp", _begun(run))
    suite.set("hostname", "localhost")
    suite.set("tests", str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", _seconds(seconds))
    facts = {"seed": str(run.seed), "profile": short(run.profile), "argv": short(" ".join(run.argv), 500)}
    _add_properties(suite, {**facts, **environment(run)}.items())
    suite.extend(cases)
    ET.SubElement(suite, "system-out").text = output
    ET.SubElement(suite, "system-err")


def _add_properties(suite: ET.Element, facts: Iterable[tuple[str, str]]) -> None:
    properties = ET.SubElement(suite, "properties")
    for name, value in facts:
        ET.SubElement(properties, "property", name=name or "-", value=value)


def _case(verdict: Verdict) -> ET.Element:
    classname = f"{short(verdict.op)}.{short(verdict.implementation)}"
    case = ET.Element("testcase", name=short(verdict.dtype), classname=classname, time=_seconds(verdict.seconds))
    if is_known(verdict):
        ET.SubElement(case, "skipped", message=f"known failure: {said(verdict)}")
    elif verdict.status == "skip":
        ET.SubElement(case, "skipped", message=said(verdict))
    elif verdict.status == "thin":  # whether that makes the run red is said by the gate's own test case
        ET.SubElement(case, "skipped", message=f"thin: {said(verdict)}")
    elif verdict.status == "fail":
        ET.SubElement(case, "failure", message=said(verdict), type=kind(verdict)).text = _told(verdict)
    elif verdict.status != "pass":
        ET.SubElement(case, "error", message=said(verdict), type=short(verdict.status)).text = _told(verdict)
    return case


def _told(verdict: Verdict) -> str:
    file, line = place(verdict)
    at = short(f"{file}:{line}" if line else file, 400)
    return f"At {at}\n{block(verdict)}" if at else block(verdict)


def _gate(run: Run) -> ET.Element:
    """The run as a whole: green with exit code 0 alone."""
    case = ET.Element("testcase", name="verdict", classname=f"{GATE}.gate", time=_seconds(run.seconds))
    if run.exit_code:
        tag = "failure" if run.status == "fail" else "error"
        wrong = ET.SubElement(case, tag, message=outcome(run), type=f"exit code {run.exit_code}")
        wrong.text = "\n".join([outcome(run), *messages(run)])
    return case


def _begun(run: Run) -> str:
    """A run does not say when it began: now, less what it took. UTC, which the schema allows nobody to say."""
    begun = datetime.now(UTC) - timedelta(seconds=min(_finite(run.seconds), 1e8))
    return begun.strftime("%Y-%m-%dT%H:%M:%S")


def _seconds(value: float) -> str:
    return f"{_finite(value):.3f}"


def _finite(value: float) -> float:
    return max(value, 0.0) if math.isfinite(value) else 0.0


REPORT = Report(name="junit", write=write, summary="JUnit XML: a suite per op, a test case per cell")
