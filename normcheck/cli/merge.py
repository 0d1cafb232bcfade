"""Command ``normcheck merge``: one run from the reports of all shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from normcheck.cli.options import Given, options
from normcheck.gate.options import VerifyOptions
from normcheck.options import built

_KEYS = ("require", "allow_thin", "known_failures", "baseline", "drift_ratio", "drift_ulp")


@options(VerifyOptions, only=("report", *_KEYS, "config"), unset=True)
def merge(
    shards: Annotated[list[str], typer.Argument(metavar="REPORT.json...", help="JSON reports of verify --shard K/N.")],
    given: Given,
) -> None:
    """Join the reports of all shards of one sweep into one verdict, report and exit code, as of one run.

    What the gate knows beside the bounds is judged here: known failures that pass, drift, what is required. What is not
    given here comes from [tool.normcheck], except reports.
    """
    from normcheck.gate.config import blamed, settings
    from normcheck.gate.decision import concluded, terms_of
    from normcheck.gate.early import targets_of
    from normcheck.gate.known_failures import marked
    from normcheck.gate.run import publish
    from normcheck.gate.shards import merged
    from normcheck.reports.json_reader import read
    from normcheck.reports.targets import screen

    found = settings({name: value for name, value in given.items() if name in _KEYS}, given.get("config"))
    values = {name: value for name, value in found.items() if name in (*_KEYS, "config")}
    with blamed({**found, "from_config": set(found.get("from_config", ())).intersection(_KEYS)}):
        checked = built(VerifyOptions, {**values, "report": given.get("report", ())})
        targets = targets_of(checked, read=shards)
        run = merged([(file, read(file)) for file in shards])
        terms = terms_of(replace(checked, part=run.part), (*checked.require, *run.required))
        run = replace(run, verdicts=tuple(marked(verdict, terms.known) for verdict in run.verdicts))
    raise typer.Exit(publish(concluded(run, terms), targets, screen(targets), cells=True))
