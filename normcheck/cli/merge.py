"""``normcheck merge``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from normcheck.cli.options import AllowThin, Baseline, Config, DriftRatio, DriftUlp, KnownFailures, Reports, Require

_KEYS = ("require", "allow_thin", "known_failures", "baseline", "drift_ratio", "drift_ulp")


def merge(
    shards: Annotated[list[str], typer.Argument(metavar="REPORT.json...", help="JSON reports of verify --shard K/N.")],
    report: Reports = None,
    require: Require = None,
    allow_thin: AllowThin = None,
    known_failures: KnownFailures = None,
    baseline: Baseline = None,
    drift_ratio: DriftRatio = None,
    drift_ulp: DriftUlp = None,
    config: Config = None,
) -> None:
    """Join the reports of all shards of one sweep into one verdict, report and exit code, as of one run.

    What the gate knows beside the bounds is judged here: known failures that pass, drift, what is required. What is not
    given here comes from [tool.normcheck], except reports.
    """
    given = {name: value for name, value in locals().items() if name in _KEYS}
    from normcheck.gate.config import blamed, settings
    from normcheck.gate.decision import concluded
    from normcheck.gate.request import request_of, targets_of, terms_of
    from normcheck.gate.run import told
    from normcheck.gate.shards import merged
    from normcheck.reports.json_reader import read

    found = settings(given, config)
    values = {key: value for key, value in found.items() if key in _KEYS}
    with blamed({**found, "from_config": set(found.get("from_config", ())).intersection(_KEYS)}):
        request = request_of({**values, "report": report or [], "config": found.get("config", "")})
        targets = targets_of(request, read=shards)
        run = merged([(file, read(file)) for file in shards])
        terms = terms_of(replace(request, part=run.part), required=run.required)
    stream = sys.stderr if any(target.path == "-" for target in targets) else sys.stdout
    raise typer.Exit(told(concluded(run, terms), targets, stream, cells=True))
