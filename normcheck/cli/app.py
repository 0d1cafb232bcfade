"""The command-line program: one function for each command, which imports what it needs; only commands import torch."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from normcheck.audit.options import AuditOptions
from normcheck.bench.options import BenchOptions
from normcheck.cli import baseline as baseline_commands
from normcheck.cli import golden as golden_commands
from normcheck.cli import imports
from normcheck.cli import kernelbot as kernelbot_commands
from normcheck.cli.compare import compare
from normcheck.cli.doctor import doctor
from normcheck.cli.explain import explain
from normcheck.cli.export_case import export_case
from normcheck.cli.merge import merge
from normcheck.cli.options import Given, options
from normcheck.cli.output import lasting
from normcheck.cli.repro import repro
from normcheck.cli.reward import reward
from normcheck.cli.skill import skill
from normcheck.cli.tolerances import tolerances
from normcheck.errors import ExitCode, NormcheckError, UsageError, one_line
from normcheck.gate.options import ListOptions, VerifyOptions
from normcheck.options import built

app = typer.Typer(
    name="normcheck",
    help="Is this normalisation kernel right? Every output against fp64, under derived bounds, forward and backward.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(baseline_commands.app, name="baseline")
app.add_typer(golden_commands.app, name="golden")
app.add_typer(kernelbot_commands.app, name="kernelbot")


@app.command()
@options(VerifyOptions, unset=True)
def verify(given: Given) -> None:
    """Check implementations; the main job and the gate.

    What is not given here comes from [tool.normcheck] in the nearest pyproject.toml.

    Exit code: 0 all that was asked for was checked and passed; 1 a finding; 2 wrong command line or configuration;
    3 normcheck itself failed; 5 nothing was checked, a required implementation did not run, a cell is thin, or one has
    fewer cases than are required; 130 interrupted.
    """
    from normcheck.gate.config import blamed, settings
    from normcheck.gate.early import looked_at

    values = settings(given, given.get("config"))
    with blamed(values):
        checked = built(VerifyOptions, values)
        looked_at(checked)
        if checked.isolation and not checked.scheduler:
            from normcheck.isolation.forkserver import COMPILED, start_early

            start_early(checked.device, () if checked.impl else COMPILED)
        from normcheck.gate.unchanged import Files

        files = Files.soon()
        with imports.at_once():
            from normcheck.cli.job import job_of

            job = job_of(checked)
        if values.get("seed") == "random":
            typer.echo(f"seed {checked.seed}", err=True)  # now: a run that is killed leaves no report
        raise typer.Exit(job(checked, tuple(sys.argv[1:]), files))


app.command()(merge)


@app.command()
@options(AuditOptions)
def audit(given: Given) -> None:
    """How good the gate is: which planted faults it finds, and whether it accuses correct kernels.

    Exit code: 0 every fault that the profile promises to kill was killed and no correct kernel accused; 1 otherwise;
    2 wrong command line; 3 normcheck itself failed; 5 nothing was exercised; 130 interrupted. With --recipe, 0
    whatever it misses.
    """
    checked = built(AuditOptions, given)
    with imports.at_once():
        from normcheck.audit.run import audit as run_audit

    raise typer.Exit(run_audit(checked, tuple(sys.argv[1:])))


@app.command()
@options(BenchOptions)
def bench(given: Given) -> None:
    """GB/s of forward and backward, beside a copy of the same bytes; only of what passes at that very shape.

    Exit code: 0 measured; 1 a finding, which gets no number; 2 wrong command line; 3 normcheck itself failed; 5 nothing
    was measured; 130 interrupted.
    """
    from normcheck.bench.early import looked_at

    checked = built(BenchOptions, given)
    looked_at(checked)
    with imports.at_once():
        from normcheck.bench.run import bench as run_bench

    raise typer.Exit(run_bench(checked, tuple(sys.argv[1:])))


app.command()(compare)


app.command()(repro)


app.command()(reward)


@app.command(name="list")
@options(ListOptions)
def list_(
    cases: Annotated[bool, typer.Option("--cases", help="The core of --op: the cases that a pass stands on.")] = False,
    *,
    given: Given,
) -> None:
    """Ops, implementations and reports, each with why it cannot run here; with --cases the core of an op.

    --cases prints a case line each, for repro, of what --impl declares, or of everything that the op has. Below them,
    on standard error, it says what a pass needs if building is dear, and with --impl what its kernel builds, as far as
    a first look shows it.
    """
    if cases:
        from normcheck.cli.list_cases import show_cases

        show_cases(built(ListOptions, given), sys.stdout, sys.stderr)
        return
    if {"op", "impl", "dtype"} & given.keys():
        raise UsageError("op, impl, dtype: expected --cases with them; without it everything is listed")
    from normcheck.cli.list import show

    show(sys.stdout)


app.command()(doctor)


app.command()(explain)


app.command(name="export-case")(export_case)


app.command()(skill)


app.command()(tolerances)


def _version(value: bool) -> None:
    if value:
        from normcheck import __version__

        typer.echo(f"normcheck {__version__}")
        raise typer.Exit()


@app.callback()
def _callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script: an error raised on purpose becomes one line on standard error and its code."""
    sys.stderr = lasting(sys.stderr)
    sys.stdout = lasting(
        sys.stdout,
        lambda: _complain(
            "standard output was closed before the end: nobody reads what follows; reports that are files have it"
        ),
    )
    try:
        code = app(prog_name="normcheck", standalone_mode=False)  # also as python -m normcheck
    except NormcheckError as error:
        _complain(str(error))
        code = error.exit_code
    except Exception as error:
        # Typer complains about the command line; any other exception is a fault of normcheck and keeps its traceback
        said = getattr(error, "format_message", None)
        if said is not None and type(error).__name__ == "NoArgsIsHelpError":
            print(said(), file=sys.stderr)
            code = UsageError.exit_code
        elif said is not None:
            _complain(said())
            code = UsageError.exit_code
        else:
            traceback.print_exc()
            code = NormcheckError.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    sys.exit(code or 0)


def _complain(message: str) -> None:
    print(f"normcheck: {one_line(message)}", file=sys.stderr)
