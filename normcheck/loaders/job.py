"""Which loader a command line asks for, and what does not go with it."""

from __future__ import annotations

from concurrent.futures import Future

from normcheck.errors import UsageError
from normcheck.gate.options import VerifyOptions
from normcheck.gate.unchanged import Files


def check_loaded(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files]) -> int:
    """Run the loader that ``options`` ask for; returns the exit code. Raises UsageError."""
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
