"""Reports read back: the same run, or one line that says what is wrong with the file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normcheck.errors import UsageError
from normcheck.reports import document, json_reader
from normcheck.reports import json as json_report
from normcheck.result import Steadiness, SweepResult, Vacuity
from tests.sample_runs import RUNS, failed, finding, hostile, passing, verdict, worst


def fullest() -> SweepResult:
    """With everything that the other samples leave out."""
    cell = verdict(
        vacuity={"y": Vacuity(zeros=1, total=2, empty=3, checks=4)},
        repeats={"dx": Steadiness(differ=0, cases=9)},
        invariance={"y": Steadiness(differ=1, cases=9)},
        known="why",
        failed_at=12,
        undeclared={"y": worst(3.2)},
    )
    budget = {"max_examples": 300, "seconds": 4.0}
    caused = failed(finding(cause="x is upcast twice"), dtype="bf16")
    cells, seed = (cell, caused), -4 * 10**400
    return replace(passing(), verdicts=cells, budget=budget, shard="2/3", required=("mine",), seed=seed)


ALL: dict[str, Callable[[], SweepResult]] = {**RUNS, "hostile": hostile, "fullest": fullest}


def written(run: SweepResult, folder: Path) -> str:
    stream = io.StringIO()
    json_report.write(run, stream)
    path = folder / "report.json"
    path.write_text(stream.getvalue(), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ALL)
def test_what_is_read_is_what_was_written(tmp_path: Path, name: str) -> None:
    run = ALL[name]()
    read = json_reader.read(written(run, tmp_path))
    assert repr(_sorted(read)) == repr(_sorted(run))  # repr: NaN is not equal to itself
    if name != "nonfinite":
        assert read == run


def _sorted(run: SweepResult) -> SweepResult:
    cells = (replace(v, worst=dict(sorted(v.worst.items())), uncheckable=dict(sorted(v.uncheckable.items())))
             for v in run.verdicts)  # fmt: skip
    return replace(run, verdicts=tuple(cells))


def changed(change: Callable[[Any], None], folder: Path) -> str:
    path = written(fullest(), folder)
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    change(report)
    Path(path).write_text(json.dumps(report), encoding="utf-8")
    return path


def put(key: str, value: object) -> Callable[[Any], None]:
    return lambda report: report.update({key: value})


def put_cell(key: str, value: object) -> Callable[[Any], None]:
    return lambda report: report["verdicts"][0].update({key: value})


WRONG: list[tuple[Callable[[Any], None], str]] = [
    (put("schema", "normcheck-audit/1"), ": schema='normcheck-audit/1': expected normcheck-report/1"),
    (put("seed", True), ": seed=True: expected an integer"),
    (put("seed", 1.0), ": seed=1.0: expected an integer"),
    (put("seconds", "long"), ": seconds='long': expected a number"),
    (put("seconds", None), ": seconds=None: expected a number"),
    (put("status", "fine"), ": status='fine': expected one of pass, fail"),
    (put("argv", "verify"), ": argv='verify': expected an array"),
    (put("argv", [1]), ": argv[0]=1: expected a string"),
    (put("verdicts", [None]), ": verdicts[0]=None: expected an object"),
    (put("complete", 1), ": complete=1: expected true or false"),
    (put("environment", []), ": environment=[]: expected an object"),
    (put("environment", {"\x1b[31m": 3}), r": environment.\x1b[31m=3: expected a string"),
    (lambda report: report.pop("profile"), ": profile is missing"),
    (lambda report: report["verdicts"][0].pop("worst"), ": verdicts[0].worst is missing"),
    (put_cell("status", "nothing"), ": verdicts[0].status='nothing': expected one of pass, thin, fail, skip, error"),
    (put_cell("cases", -1), ": verdicts[0].cases=-1: expected an integer >= 0"),
    (put_cell("cases", 10**30), ": verdicts[0].cases=1000"),
    (put_cell("shapes", 2.0), ": verdicts[0].shapes=2.0: expected an integer"),
    (put_cell("shapes", -1), ": verdicts[0].shapes=-1: expected an integer >= 0"),
    (put_cell("worst", {"y": {"ratio": "big"}}), ": verdicts[0].worst.y.ratio='big': expected a number"),
    (put_cell("failure", {"kind": "boredom"}), ": verdicts[0].failure.kind='boredom': expected one of mismatch"),
    (put_cell("failure", 3), ": verdicts[0].failure=3: expected an object"),
    (put_cell("skipped", {"x": "y"}), ": verdicts[0].skipped.x='y': expected an integer"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_reports_that_are_wrong(tmp_path: Path, number: int) -> None:
    change, expected = WRONG[number]
    path = changed(change, tmp_path)
    refused(path, f"{path}{expected}")


def test_an_older_report_has_no_larger_case_and_no_command_that_explains(tmp_path: Path) -> None:
    def older(report: Any) -> None:
        for failure in filter(None, (cell["failure"] for cell in report["verdicts"])):
            del failure["larger"], failure["explain"]

    failures = [v.failure for v in json_reader.read(changed(older, tmp_path)).verdicts if v.failure is not None]
    assert failures
    assert {(failure.larger, failure.explain) for failure in failures} == {(None, "")}


def test_an_older_report_does_not_say_its_shapes(tmp_path: Path) -> None:
    """It is read, and what is made of it says none; nothing takes that for no shape at all."""
    path = changed(lambda report: report["verdicts"][0].pop("shapes"), tmp_path)
    assert json_reader.read(path).verdicts[0].shapes is None
    again = Path(written(json_reader.read(path), tmp_path)).read_text(encoding="utf-8")
    assert json.loads(again)["verdicts"][0]["shapes"] is None


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    whole = Path(written(fullest(), tmp_path)).read_bytes()
    for content, expected in {
        whole[: len(whole) // 2]: "in JSON: ",
        b"": "in JSON: Expecting value",
        b"\xff\xfe": "in UTF-8",
        b"[" * 1_000_000: "in JSON: ",
        b'{"a":' * 200_000: "in JSON: ",
        b'{"schema": "normcheck-report/1", "seed": ' + b"9" * 5000 + b"}": "in JSON: ",
        b'{"schema": "normcheck-report/1", "seconds": NaN}': "NaN is not JSON",
        b'{"schema": "normcheck-report/1", "seed": 1, "seed": 2}': "twice",
        b'{"schema": "normcheck-report/1"}': "argv is missing",
        b"[]": "schema=[]: expected normcheck-report/1",
        b"3": "schema=3: expected normcheck-report/1",
        b'{"schema": "' + b"x" * 10_000 + b'"}': "expected normcheck-report/1",
        b"cos\nsystem\n(S'false'\ntR.": "in JSON: ",
    }.items():
        path.write_bytes(content)
        refused(str(path), expected)
    for missing in ("missing.json", "a" * 300, "nul\0", str(tmp_path)):
        refused(missing, "expected normcheck-report/1")
    monkeypatch.setattr(document, "LARGEST_BYTES", 100)
    path.write_bytes(whole)
    refused(str(path), "at most 100 bytes")


def refused(path: str, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        json_reader.read(path)
    message = str(raised.value)
    assert expected in message
    assert message.isprintable()
    assert len(message) < 800
