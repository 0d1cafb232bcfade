"""The JUnit report, as somebody else's parser reads it, and what Ant's schema asks of it.

There is no official schema of JUnit, and no wheel was found that brings one of those in use (junitparser, junit-xml,
xunitparser, unittest-xml-reporting, nose2, tap2junit do not); so what Ant's asks for is asserted here, rule by rule.
"""

from __future__ import annotations

import io
import re
from datetime import datetime
from xml.etree import ElementTree as ET

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped, TestSuite

from normcheck.reports import junit
from normcheck.result import SweepResult
from tests.hostile_text import HARM
from tests.sample_runs import RUNS, failing, finding, hostile, known, large, required, run, skipped, verdict

ALL = {**RUNS, "hostile": hostile, "large": large}
SUITE = ["name", "package", "id", "timestamp", "hostname", "tests", "failures", "errors", "skipped", "time"]
"""Required by Ant's schema, but for skipped."""


def text_of(a_run: SweepResult) -> str:
    stream = io.StringIO()
    junit.REPORT.write(a_run, stream)
    return stream.getvalue()


def parsed(a_run: SweepResult) -> list[TestSuite]:
    return list(JUnitXml.fromstring(text_of(a_run).encode()))


@pytest.mark.parametrize("name", ALL)
def test_cells_and_outcomes_are_those_of_the_run(name: str) -> None:
    a_run = ALL[name]()
    *ops, gate = parsed(a_run)
    results = [case.result[0] if case.result else None for suite in ops for case in suite]
    wanted = {"pass": type(None), "thin": Skipped, "fail": Failure, "error": Error, "skip": Skipped}
    order = list(dict.fromkeys(v.op for v in a_run.verdicts))
    cells = sorted(a_run.verdicts, key=lambda v: order.index(v.op))
    assert len(results) == len(cells)
    for result, cell in zip(results, cells, strict=True):
        is_known = cell.status == "fail" and cell.known
        assert type(result) is (Skipped if is_known else wanted[cell.status])
    (case,) = gate
    assert bool(case.result) == bool(a_run.exit_code)


@pytest.mark.parametrize("name", ALL)
def test_what_the_schema_asks_for(name: str) -> None:
    root = ET.fromstring(text_of(ALL[name]()))
    assert (root.tag, root.attrib) == ("testsuites", {})
    for number, suite in enumerate(root):
        assert list(suite.attrib) == SUITE
        assert suite.get("id") == str(number)
        assert datetime.fromisoformat(suite.attrib["timestamp"]).tzinfo is None
        tags = [child.tag for child in suite]
        cases = suite.findall("testcase")
        assert tags == ["properties", *["testcase"] * len(cases), "system-out", "system-err"]
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert suite.get(attribute) == str(len(suite.findall(f"testcase/{tag}")))
        assert suite.get("tests") == str(len(cases))
        for case in cases:
            assert list(case.attrib) == ["name", "classname", "time"]
            assert re.fullmatch(r"\d+\.\d{3}", case.attrib["time"])  # a decimal of the schema
            assert len(case) <= 1
            assert all(child.get("type") for child in case if child.tag != "skipped")


def test_a_failure_says_where_what_and_how_to_run_it_again() -> None:
    (case,) = (c for suite in parsed(failing()) for c in suite if (c.classname, c.name) == ("rmsnorm.mine.py", "fp16"))
    (failure,) = case.result
    assert failure.type == "mismatch"
    assert failure.message == "dx is wrong (given the reference's statistics)"
    assert failure.text.startswith("At kernels/mine.py:12\nFAIL rmsnorm mine.py fp16: dx is wrong")
    assert failure.text.endswith("Reproduce: " + finding().reproduce)


def test_properties_tell_of_the_environment_and_the_seed() -> None:
    properties = {p.name: p.value for p in parsed(run(verdict(), seed=17))[0].properties()}
    assert properties["seed"] == "17"
    assert properties["torch"] == "2.9.0"


def test_a_gate_that_is_red_for_what_did_not_run_is_red_here() -> None:
    (case,) = parsed(required())[-1]
    assert isinstance(case.result[0], Error)
    assert "required=cudnn did not run" in case.result[0].message


def test_a_known_failure_is_skipped_and_says_so() -> None:
    (case,) = (c for suite in parsed(known()) for c in suite if c.classname == "rmsnorm.mine.py")
    assert case.result[0].message.startswith("known failure: dx is wrong")


@pytest.mark.parametrize("text", [*HARM, "]]>", "<!-- -->", "&amp;", "\ufffe\uffff", "x" * 1_000_000, " ", ""])
def test_harmful_text(text: str) -> None:
    """It is XML to a parser, ASCII to a stream, of a length that has an end, and no command to a CI log."""
    failure = finding(message=text, advice=text, mismatched=None, check=text, output=text)
    cells = (verdict(op=text, implementation=text, dtype=text, status="fail", failure=failure), skipped(detail=text))
    a_run = run(*cells, environment={text: text, "a": text}, messages=(text,), status="fail", exit_code=1, argv=(text,))
    written = text_of(a_run)
    assert written.isascii()
    assert len(written) < 60_000
    assert not any(line.lstrip().startswith("::") for line in written.split("\n"))
    assert len(parsed(a_run)) == len({text, "rmsnorm"}) + 1
