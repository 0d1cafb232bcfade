"""Which loader a command line asks for, and what does not go with it."""

from __future__ import annotations

from concurrent.futures import Future

from normcheck.errors import UsageError, one_of
from normcheck.gate.options import PROMISING, VerifyOptions
from normcheck.gate.unchanged import Files


def check_loaded(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files]) -> int:
    """Run the loader that ``options`` ask for; returns the exit code. Raises UsageError."""
    _refuse_others(options)
    if options.kernelbench is not None:
        from normcheck.loaders.problem import check_answer

        return check_answer(options, argv, files)
    for name in ("solution", "definition"):
        if not getattr(options, name):
            raise UsageError(f"{name} is missing: expected --solution SOLUTION.json --definition DEFINITION.json")
    if options.trace and not options.workload:
        raise UsageError(f"trace={options.trace}: expected --workload with it; a trace has a line for each workload")
    from normcheck.loaders.solution import check_solution

    return check_solution(options, argv, files)


def _refuse_others(options: VerifyOptions) -> None:
    """Raise UsageError for an option of the command line that says what the loader reads, or that it has no use for."""
    if options.kernelbench is not None:
        if options.solution or options.definition or options.workload or options.trace:
            raise UsageError("kernelbench: expected no --solution, --definition, --workload, --trace with it")
    elif options.dtype and "dtype" not in options.from_config:
        raise UsageError(f"dtype={','.join(options.dtype)}: expected none with --solution; its definition has one")
    for name in ("impl", "op", "scheduler", "watch", "shard", "timings", "database", "require"):
        if getattr(options, name) and name not in options.from_config:
            raise UsageError(f"{name}: expected no --{name} with --solution or --kernelbench")
    if not options.isolation:
        raise UsageError("isolation: expected no --no-isolation with what others wrote")
    if options.profile == "soak":
        raise UsageError(f"profile=soak: expected {one_of(PROMISING)} with --solution or --kernelbench")
