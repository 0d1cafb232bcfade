"""Writing every report of 10,000 cases takes less than a second, and a page with pictures less than three."""

from __future__ import annotations

import io
import time

import pytest

from normcheck.reports.report import formats
from tests.sample_runs import large


@pytest.mark.slow
def test_every_report_of_a_large_run_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    a_run = large()
    assert sum(v.cases for v in a_run.verdicts) >= 10_000
    assert sum(v.status == "fail" for v in a_run.verdicts) == 50
    reports = dict(formats())
    assert set(reports) == {"terminal", "json", "junit", "github", "markdown", "sarif", "html"}
    page = reports.pop("html")
    start = time.process_time()  # of this process: what else the machine does is not the question
    for report in reports.values():
        report.write(a_run, io.StringIO())
    assert time.process_time() - start < 1.0
    start = time.process_time()
    page.write(a_run, io.StringIO())
    assert time.process_time() - start < 3.0  # half of it matplotlib's import and its first picture
