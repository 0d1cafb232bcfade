"""Writing every report of 10,000 cases takes less than a second."""

from __future__ import annotations

import io
import time

import pytest

from normcheck.reports.report import formats
from tests.sample_runs import large


def test_every_report_of_a_large_run_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    a_run = large()
    assert sum(v.cases for v in a_run.verdicts) >= 10_000
    assert sum(v.status == "fail" for v in a_run.verdicts) == 50
    reports = formats()
    assert set(reports) >= {"terminal", "json", "junit", "github", "markdown", "sarif"}
    start = time.process_time()  # of this process: what else the machine does is not the question
    for report in reports.values():
        report.write(a_run, io.StringIO())
    assert time.process_time() - start < 1.0
