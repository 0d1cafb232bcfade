"""JUnit report, the XML of Jenkins, GitLab and others: a suite per op, a test case per cell, and one for the gate.

The order and the attributes are those of Ant's schema, the strictest in use. A character that XML 1.0 lacks is shown as
its escape. No library writes it, since junitparser has neither that order nor escapes; the tests read with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TextIO
from xml.etree import ElementTree as ET

from normcheck.reports._plain_text import block, cells, environment, is_known, kind, messages, outcome, place, reason
from normcheck.reports._text import short
from normcheck.reports.report import Report
from normcheck.result import SweepResult, Verdict

GATE = "normcheck"
"""The suite of the run as a whole: without it, a run that failed because a cell did not run would look green."""


def write(run: SweepResult, stream: TextIO) -> None:
    """Write ``run`` in ASCII, so that no encoding of ``stream`` can refuse it."""
    root = ET.Element("testsuites")
    for op in dict.fromkeys(verdict.op for verdict in run.verdicts):
        own = [verdict for verdict in run.verdicts if verdict.op == op]
        cases = [_case(verdict) for verdict in own]
        _add_suite(root, run, short(op) or "-", cases, sum(_finite(v.seconds) for v in own), cells(own))
    _add_suite(root, run, GATE, [_gate(run)], run.seconds, outcome(run))
    ET.indent(root)
    stream.write(ET.tostring(root, encoding="us-ascii", xml_declaration=True).decode("ascii") + "\n")


def _add_suite(
    root: ET.Element, run: SweepResult, name: str, cases: Sequence[ET.Element], seconds: float, output: str
) -> None:
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
        ET.SubElement(case, "skipped", message=f"known failure: {reason(verdict)}")
    elif verdict.status in ("skip", "thin"):  # the gate's own test case says whether that fails the run
        ET.SubElement(case, "skipped", message=reason(verdict))
    elif verdict.status == "fail":
        ET.SubElement(case, "failure", message=reason(verdict), type=kind(verdict)).text = _text_of(verdict)
    elif verdict.status != "pass":
        ET.SubElement(case, "error", message=reason(verdict), type=short(verdict.status)).text = _text_of(verdict)
    return case


def _text_of(verdict: Verdict) -> str:
    file, line = place(verdict)
    at = short(f"{file}:{line}" if line else file, 400)
    return f"At {at}\n{block(verdict)}" if at else block(verdict)


def _gate(run: SweepResult) -> ET.Element:
    """The run as a whole: green with exit code 0 alone."""
    case = ET.Element("testcase", name="verdict", classname=f"{GATE}.gate", time=_seconds(run.seconds))
    if run.exit_code:
        tag = "failure" if run.status == "fail" else "error"
        wrong = ET.SubElement(case, tag, message=outcome(run), type=f"exit code {run.exit_code}")
        wrong.text = "\n".join([outcome(run), *messages(run)])
    return case


def _begun(run: SweepResult) -> str:
    """When the run began, reckoned from now and its seconds. In UTC; the schema has no place for a time zone."""
    begun = datetime.now(UTC) - timedelta(seconds=min(_finite(run.seconds), 1e8))
    return begun.strftime("%Y-%m-%dT%H:%M:%S")


def _seconds(value: float) -> str:
    return f"{_finite(value):.3f}"


def _finite(value: float) -> float:
    return max(value, 0.0) if math.isfinite(value) else 0.0


REPORT = Report(name="junit", write=write, summary="JUnit XML: a suite per op, a test case per cell")
