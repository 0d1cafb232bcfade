"""Which loader a command line asks for, and what does not go with it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from normcheck.cases.case_line import parsed
from normcheck.errors import UsageError, one_of
from normcheck.gate.options import PROMISING, ReproOptions, VerifyOptions
from normcheck.gate.unchanged import Files


def check_loaded(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files]) -> int:
    """Run the loader that ``options`` ask for; returns the exit code. Raises UsageError."""
    _refuse_mixed(options)
    _refuse_others(options)
    if options.kernelbench is not None:
        from normcheck.loaders.problem import answered

        with answered(options, tuple(dict.fromkeys(options.dtype)) or ("fp32",)) as engine:
            return engine.checked(options, argv, files)
    if options.trace and not options.workload:
        raise UsageError(f"trace={options.trace}: expected --workload with it; a trace has a line for each workload")
    from normcheck.loaders.solution import check_solution

    return check_solution(options, argv, files)


def repro_loaded(lines: Sequence[str], options: ReproOptions) -> int:
    """Run case lines again on what ``options`` name; returns the exit code. Raises UsageError."""
    _refuse_mixed(options)
    if options.pdb:
        raise UsageError("pdb: expected none with --solution or --kernelbench, whose code runs in a process of its own")
    dtypes = tuple(dict.fromkeys(parsed(line).dtype for line in lines))
    if options.kernelbench is not None:
        from normcheck.loaders.problem import answered

        loaded = answered(options, dtypes)
    else:
        from normcheck.loaders.solution import documents_of, solved

        loaded = solved(options, documents_of(options))
    with loaded as engine:
        return engine.reproduced(lines, options)


def _refuse_mixed(options: VerifyOptions | ReproOptions) -> None:
    """Raise UsageError for options of two loaders, or for one that runs strangers' code in this process."""
    if options.kernelbench is not None and (options.solution or options.definition or options.workload):
        raise UsageError("kernelbench: expected no --solution, --definition, --workload with it")
    if not options.isolation:
        raise UsageError("isolation: expected no --no-isolation with what others wrote")


def _refuse_others(options: VerifyOptions) -> None:
    """Raise UsageError for an option of the command line that says what the loader reads, or that it has no use for."""
    if options.kernelbench is not None and options.trace:
        raise UsageError("kernelbench: expected no --trace with it")
    for name in ("impl", "op", "scheduler", "watch", "shard", "timings", "database", "require"):
        if getattr(options, name) and name not in options.from_config:
            raise UsageError(f"{name}: expected no --{name} with --solution or --kernelbench")
    if options.profile == "soak":
        raise UsageError(f"profile=soak: expected {one_of(PROMISING)} with --solution or --kernelbench")
