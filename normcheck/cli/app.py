"""argv -> Plan -> sweep -> reports -> exit code. Reads as a table of contents; torch is imported only by commands."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from normcheck.cli import baseline as baseline_commands
from normcheck.cli import complete
from normcheck.cli import golden as golden_commands
from normcheck.cli.doctor import doctor
from normcheck.cli.merge import merge
from normcheck.cli.options import (
    AllowThin,
    Baseline,
    Config,
    Device,
    DriftRatio,
    DriftUlp,
    Dtype,
    Impl,
    KnownFailures,
    Op,
    Quiet,
    Reports,
    Require,
    Timeout,
    Verbose,
    verbosity_of,
)
from normcheck.cli.repro import repro
from normcheck.cli.tolerances import tolerances
from normcheck.cli.warm import warm
from normcheck.errors import NormcheckError, UsageError, one_line

app = typer.Typer(
    name="normcheck",
    help="Is this normalisation kernel right? Every output against fp64, under derived bounds, forward and backward.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(baseline_commands.app, name="baseline")
app.add_typer(golden_commands.app, name="golden")


@app.command()
def verify(
    op: Op = None,
    impl: Impl = None,
    dtype: Dtype = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="quick, ci or deep: how much a cell may cost. Default: quick.",
            autocompletion=complete.profiles,
        ),
    ] = None,
    max_examples: Annotated[
        int | None, typer.Option("--max-examples", help="Cases per cell, its core included.")
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", help="Seconds per cell, after its core.")
    ] = None,
    seed: Annotated[
        str | None, typer.Option("--seed", help="Another seed draws other cases; random draws one. Default: 0.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="auto, cpu or cuda. Default: auto.", autocompletion=complete.devices),
    ] = None,
    require: Require = None,
    allow_thin: AllowThin = None,
    report: Reports = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds that a case may take. Default: 120.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Cells that are checked side by side. Default: 1.")
    ] = None,
    isolation: Annotated[
        bool | None,
        typer.Option("--isolation/--no-isolation", help="Run kernels in processes of their own (default), or in this."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="K/N: of all cases those of job K of N; see normcheck merge.")
    ] = None,
    database: Annotated[
        str | None, typer.Option("--database", help="Folder of cases that failed: kept there, and run first next time.")
    ] = None,
    known_failures: KnownFailures = None,
    baseline: Baseline = None,
    drift_ratio: DriftRatio = None,
    drift_ulp: DriftUlp = None,
    config: Config = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check implementations; the main job and the gate.

    What is not given here comes from [tool.normcheck] in the nearest pyproject.toml.

    Exit code: 0 all that was asked for was checked and passed; 1 a finding; 2 wrong command line or configuration;
    3 normcheck itself failed; 5 nothing was checked, a required implementation did not run, or a cell that is required,
    or of profile ci or deep, is thin; 130 interrupted.
    """
    given = {name: value for name, value in locals().items() if name not in ("config", "quiet", "verbose")}
    from normcheck.gate.config import blamed, settings

    values = settings(given, config)
    warm(values.get("device", "auto"), values.get("isolation", True))
    from normcheck.gate.request import request_of
    from normcheck.gate.run import run

    with blamed(values):
        request = request_of({**values, "verbosity": verbosity_of(quiet, verbose)})
        if values.get("seed") == "random":
            typer.echo(f"seed {request.seed}", err=True)  # now: a run that is killed leaves no report
        raise typer.Exit(run(request, tuple(sys.argv[1:])))


app.command()(merge)


@app.command()
def audit(
    op: Op = None,
    dtype: Dtype = None,
    profile: Annotated[
        str,
        typer.Option("--profile", help="quick, ci or deep: what is put to the test.", autocompletion=complete.profiles),
    ] = "quick",
    mutant: Annotated[
        list[str] | None, typer.Option("--mutant", help="Planted fault to run, without correct kernels; may repeat.")
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="Judge by a fixed tolerance instead: a name, or atol=1e-2,rtol=1e-2.",
            autocompletion=complete.recipes,
        ),
    ] = "",
    regime: Annotated[
        list[str] | None,
        typer.Option(
            "--regime",
            help="Only faults that are there in some calls alone, such as tall or one_n:768, or all; may repeat.",
            autocompletion=complete.regimes,
        ),
    ] = None,
    regime_cells: Annotated[
        str,
        typer.Option(
            "--regime-cells",
            help="one or all: the ops and dtypes that a fault under a regime is run in.",
            autocompletion=complete.regime_cells,
        ),
    ] = "one",
    seed: Annotated[int, typer.Option("--seed", help="Another seed draws other cases.")] = 0,
    device: Device = "auto",
    report: Annotated[
        list[str] | None,
        typer.Option("--report", help="json:PATH; - is standard output.", autocompletion=complete.audit_reports),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes; by default one a core, at most 8.", show_default=False)
    ] = None,
) -> None:
    """How good the gate is: which planted faults it finds, and whether it accuses correct kernels.

    Exit code: 0 every fault that the profile promises to kill was killed and no correct kernel accused; 1 otherwise;
    2 wrong command line; 3 normcheck itself failed; 5 nothing was exercised; 130 interrupted. With --recipe, 0
    whatever it misses.
    """
    from normcheck.audit.run import AuditRequest
    from normcheck.audit.run import audit as run_audit

    request = AuditRequest(
        ops=tuple(op or ()),
        dtypes=tuple(dtype or ()),
        mutants=tuple(mutant or ()),
        profile=profile,
        seed=seed,
        device=device,
        workers=workers,
        recipe=recipe,
        regimes=tuple(regime or ()),
        regime_cells=regime_cells,
        reports=tuple(report or ()),
    )
    raise typer.Exit(run_audit(request, tuple(sys.argv[1:])))


@app.command()
def bench(
    op: Op = None,
    impl: Impl = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="fp16, bf16 or fp32; may repeat. Default: bf16.", autocompletion=complete.dtypes),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            help="triton-tutorial or pytorch-layernorm-backward: their shapes and bytes.",
            autocompletion=complete.suites,
        ),
    ] = "",
    sizes: Annotated[list[str] | None, typer.Option("--sizes", help="M,N such as 4096,1024; may repeat.")] = None,
    device: Device = "auto",
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report",
            help="csv:PATH, json:PATH or png:PATH; - is standard output.",
            autocompletion=complete.bench_reports,
        ),
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", help="Seconds after which nothing new is begun.")
    ] = None,
    timeout: Timeout = 120.0,
) -> None:
    """GB/s of forward and backward, beside a copy of the same bytes; only of what passes at that very shape.

    Exit code: 0 measured; 1 a finding, which gets no number; 2 wrong command line; 3 normcheck itself failed; 5 nothing
    was measured; 130 interrupted.
    """
    from normcheck.bench.plan import BenchRequest
    from normcheck.bench.run import bench as run_bench

    request = BenchRequest(
        ops=tuple(op or ()),
        impls=tuple(impl or ()),
        dtypes=tuple(dtype or ()),
        suite=suite,
        sizes=tuple(sizes or ()),
        device=device,
        time_budget=time_budget,
        timeout=timeout,
        reports=tuple(report or ()),
    )
    raise typer.Exit(run_bench(request, tuple(sys.argv[1:])))


app.command()(repro)


@app.command(name="list")
def list_(
    cases: Annotated[bool, typer.Option("--cases", help="The core of --op: the cases that a pass stands on.")] = False,
    op: Op = None,
    impl: Impl = None,
    dtype: Dtype = None,
    profile: Annotated[
        str, typer.Option("--profile", help="quick, ci or deep.", autocompletion=complete.profiles)
    ] = "quick",
    seed: Annotated[int, typer.Option("--seed", help="As of verify: another seed has another core.")] = 0,
    device: Device = "auto",
) -> None:
    """Ops, implementations and reports, each with why it cannot run here; with --cases the core of an op.

    --cases prints a case line each, for repro, of what --impl declares, or of everything that the op has.
    """
    if cases:
        from normcheck.cli.list_cases import show_cases

        show_cases(op or [], impl or [], dtype or [], profile=profile, seed=seed, device=device, stream=sys.stdout)
        return
    if op or impl or dtype:
        raise UsageError("op, impl, dtype: expected --cases with them; without it everything is listed")
    from normcheck.cli.list import show

    show(sys.stdout)


app.command()(doctor)


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
    """The console script: errors raised on purpose become one line on standard error and their exit code."""
    try:
        code = app(prog_name="normcheck", standalone_mode=False)  # also as python -m normcheck
    except NormcheckError as error:
        _complain(str(error))
        code = error.exit_code
    except Exception as error:
        # Typer's own complaints about the command line; everything else is a fault of normcheck and keeps its traceback
        if hasattr(error, "format_message"):
            _complain(error.format_message())
            code = UsageError.exit_code
        else:
            traceback.print_exc()
            code = NormcheckError.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as left:  # as of Click where nobody reads what is written: with 1, which here means a finding
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        _complain("standard output was closed before the end: expected a reader until then; reports may be missing")
        code = NormcheckError.exit_code
    sys.exit(code or 0)


def _complain(message: str) -> None:
    print(f"normcheck: {one_line(message)}", file=sys.stderr)
