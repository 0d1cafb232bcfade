"""The JSON report: strict, in the promised order, and the same bytes every time."""

from __future__ import annotations

import io
import json
from typing import Any, NoReturn

import pytest

from normcheck.reports import json as json_report
from tests.sample_runs import RUNS, failing, hostile, nonfinite, passing, run

ALL = {**RUNS, "hostile": hostile}

TOP = ["schema", "normcheck", "argv", "seed", "profile", "seconds", "environment", "status", "exit_code", "verdicts"]
VERDICT = [
    "op",
    "implementation",
    "dtype",
    "device",
    "status",
    "detail",
    "cases",
    "seconds",
    "worst",
    "not_returned",
    "failure",
]
FAILURE = [
    "kind",
    "output",
    "case",
    "index",
    "actual",
    "expected",
    "error",
    "bound",
    "ratio",
    "max_ulp",
    "mismatched",
    "numel",
    "message",
    "reproduce",
]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def text_of(name: str) -> str:
    stream = io.StringIO()
    json_report.REPORT.write(ALL[name](), stream)
    return stream.getvalue()


def loaded(name: str) -> Any:
    return json.loads(text_of(name), parse_constant=refuse)


@pytest.mark.parametrize("name", ALL)
def test_strict_and_complete(name: str) -> None:
    report, expected = loaded(name), ALL[name]()
    assert list(report)[: len(TOP)] == TOP
    assert report["schema"] == "normcheck-report/1"
    assert (report["status"], report["exit_code"]) == (expected.status, expected.exit_code)
    assert report["complete"] is expected.complete
    assert report["messages"] == list(expected.messages)
    assert len(report["verdicts"]) == len(expected.verdicts)
    for cell in report["verdicts"]:
        assert list(cell)[: len(VERDICT)] == VERDICT
        assert {"uncheckable", "skipped", "model", "notes"} <= set(cell)
        for worst in cell["worst"].values():
            assert list(worst) == ["ratio", "max_abs", "max_ulp", "case"]
        if cell["failure"] is not None:
            assert list(cell["failure"])[: len(FAILURE)] == FAILURE
            assert {"check", "terms", "where", "also", "advice", "traceback"} <= set(cell["failure"])


@pytest.mark.parametrize("name", ALL)
def test_same_bytes_ascii_and_a_last_newline(name: str) -> None:
    text = text_of(name)
    assert text == text_of(name)
    assert text.isascii()
    assert text.endswith("}\n")
    assert all(character >= " " or character == "\n" for character in text)


def test_numbers_that_json_does_not_have() -> None:
    report = loaded("nonfinite")
    failure = report["verdicts"][0]["failure"]
    assert (failure["actual"], failure["expected"], failure["bound"]) == ("NaN", "-Infinity", "Infinity")
    assert failure["max_ulp"] is None
    assert report["verdicts"][0]["worst"]["dx"]["ratio"] == "NaN"
    assert nonfinite().verdicts[0].failure is not None


def test_outputs_have_one_order() -> None:
    assert list(loaded("nonfinite")["verdicts"][0]["worst"]) == ["y", "dx"]
    assert list(loaded("pass")["verdicts"][1]["worst"]) == ["y", "bitmask"]


def test_failure_keeps_what_was_found() -> None:
    failure = loaded("fail")["verdicts"][1]["failure"]
    expected = failing().verdicts[1].failure
    assert expected is not None
    assert expected.where is not None
    assert failure["index"] == [2, 128]
    assert failure["terms"][0] == {"name": "store", "value": 1.5e-4}
    assert failure["where"]["grid"][2][42] == expected.where.grid[2][42]
    assert failure["reproduce"] == expected.reproduce


def test_hostile_strings_come_back_unchanged() -> None:
    report, expected = loaded("hostile"), hostile()
    assert report["verdicts"][0]["op"] == expected.verdicts[0].op
    assert report["messages"] == list(expected.messages)


def test_version_comes_from_the_run_where_it_says() -> None:
    assert json_report.document(run(environment={"normcheck": "9.9"}))["normcheck"] == "9.9"
    assert isinstance(json_report.document(passing())["normcheck"], str)
