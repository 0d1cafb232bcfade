"""``verify --solution --definition``: a solution of flashinfer-bench or SOL-ExecBench as a cell, and its traces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from normcheck.errors import ImportFailed, UsageError, one_line, shown
from normcheck.gate.options import ReproOptions, VerifyOptions
from normcheck.gate.prepare import selected
from normcheck.gate.unchanged import Files
from normcheck.loaders.asked import Judged, Loaded
from normcheck.loaders.documents import Definition, Solution, Workload, definition_of, solution_of, workloads_of
from normcheck.loaders.entry import ENTRY, ENTRY_SOURCE, SPEC, Entry
from normcheck.loaders.folder import Folder, private_folder, told_of
from normcheck.loaders.recognise import recognised
from normcheck.loaders.signature import (
    Signature,
    asked_shapes,
    given_eps,
    rows_and_columns,
    signature_of,
    written_eps,
)
from normcheck.loaders.trace import traces
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment

_SWEPT_ELEMENTS = {"cpu": 320_000, "cuda": 1 << 22}
"""Of a shape of the sweep; larger workloads are judged after it."""

_MOST_SHAPES = 12
_PROBED_ROWS = 3
_REFERENCE = "normcheck_reference.py"


class Documents(NamedTuple):
    """What is read of a solution."""

    definition: Definition
    solution: Solution
    workloads: tuple[Workload, ...]
    signature: Signature


def documents_of(options: VerifyOptions | ReproOptions) -> Documents:
    """The documents that ``options`` name. Raises UsageError."""
    for name in ("solution", "definition"):
        if not getattr(options, name):
            raise UsageError(f"{name} is missing: expected --solution SOLUTION.json --definition DEFINITION.json")
    definition, solution = definition_of(options.definition), solution_of(options.solution)
    if solution.definition != definition.name:
        raise UsageError(
            f"solution={shown(solution.name)}: is of definition {shown(solution.definition)}, "
            f"expected {shown(definition.name)}"
        )
    workloads = workloads_of(options.workload) if options.workload else ()
    return Documents(definition, solution, workloads, signature_of(definition))


def check_solution(options: VerifyOptions, argv: tuple[str, ...], files: Future[Files]) -> int:
    """Check the solution that ``options`` name against its definition; returns the exit code. Raises UsageError."""
    documents = documents_of(options)
    definition, solution, workloads, signature = documents
    if options.dtype not in ((), (signature.dtype,)) and "dtype" not in options.from_config:
        raise UsageError(f"dtype={','.join(options.dtype)}: expected {signature.dtype}, which its definition has")
    with solved(options, documents) as engine:
        engine.always = bool(options.trace)
        try:
            return engine.checked(options, argv, files)
        except ImportFailed as failed:
            engine.judged = [Judged(shape=shape, kind="import", message=str(failed)) for shape in engine.asked]
            raise
        finally:
            if options.trace and len(engine.judged) == len(workloads):
                text = traces(definition.name, solution.name, workloads, engine.judged, environment(engine.device))
                _write_trace(options.trace, text)


@contextmanager
def solved(options: VerifyOptions | ReproOptions, documents: Documents) -> Iterator[Loaded]:
    """The cell of the solution in ``documents``, which ``options`` name. Raises UsageError."""
    definition, solution, workloads, signature = documents
    asked = asked_shapes(signature, workloads)
    device = device_for(options.device)
    with private_folder() as folder:
        entry = _recognised(definition, signature, workloads, asked, device, options.timeout, folder)
        entry = replace(
            entry,
            name=one_line(solution.name, 200),
            file=solution.entry_file,
            function=solution.spec.entry_point.partition("::")[2],
            into=solution.spec.destination_passing_style,
        )
        sources = {source.path: source.content for source in solution.sources}
        yield Loaded(
            claims=entry.declared(entry.ops[0], _never),
            place=_written(folder, "solution", sources, entry),
            device=device,
            words=("--solution", options.solution, "--definition", options.definition)
            + (("--workload", options.workload) if options.workload else ()),
            named=f"solution={one_line(options.solution, 200)}",
            asked=tuple(map(rows_and_columns, asked)),
        )


def _recognised(
    definition: Definition,
    signature: Signature,
    workloads: Sequence[Workload],
    asked: Sequence[tuple[int, ...]],
    device: str,
    timeout: float,
    folder: Folder,
) -> Entry:
    """The entry of a definition's reference, with the one op and the eps that it was recognised as."""
    what = f"definition={shown(definition.name)}"
    if not signature.ops:
        raise UsageError(f"{what}: expected the inputs of an op, not {', '.join(map(shown, definition.inputs))}")
    columns = tuple(dict.fromkeys(full[-1] for full in asked)) or tuple(
        signature.const[axis] for axis in signature.axes[-1:] if axis in signature.const
    )
    if not columns:
        raise UsageError(f"{what}: its rows have no length; expected --workload, which gives one to each variable axis")
    full = {shape: x for n in columns for shape, x in signature.small(n).items()}
    full |= {rows_and_columns(x): x for x in asked}
    swept = _swept(tuple(full), device)
    free = "eps" in signature.roles
    entry = Entry(
        name="reference",
        file=_REFERENCE,
        function="run",
        into=False,
        inputs=signature.inputs,
        outputs=signature.outputs,
        rank=len(signature.axes),
        full=tuple(full.items()),
        ops=_by_name(signature.ops, f"{definition.op_type} {definition.name}"),
        dtype=signature.dtype,
        shapes=_probed(tuple(full)),
        epsilons=(),
    )
    place = _written(folder, "reference", {_REFERENCE: definition.reference}, entry)
    try:
        candidates = selected(str(place), (), device, timeout, isolation=True)
    except ImportFailed as failed:
        raise told_of(failed, place, f"{what}, its reference") from None
    given = given_eps(signature, workloads)
    tried = (given or (1e-5, 1e-3)) if free else written_eps(definition.reference)
    claims = {i.op: i.forward for i in candidates}
    held = [entry.declared(op, claims[op]) for op in entry.ops if op in claims]
    found = recognised(held, tried, device, timeout, what, any_eps=free)
    epsilons = given if found.eps is None else (found.eps,)
    return replace(entry, ops=(found.implementation.op,), shapes=swept, epsilons=epsilons)


def _by_name(ops: Sequence[str], named: str) -> tuple[str, ...]:
    """``ops`` in the order in which they are tried: in fp32 several may be the same, and the plain one is first."""
    return tuple(sorted(ops, key=lambda op: (op.count("_") > 0 and op not in named, list(ops).index(op))))


def _probed(shapes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """One shape to try a reference at: the one whose rows are nearest to a few, of the shortest ones."""
    return (min(shapes, key=lambda shape: (shape[1], abs(math.log(shape[0] / _PROBED_ROWS)))),)


def _swept(shapes: Sequence[tuple[int, int]], device: str) -> tuple[tuple[int, int], ...]:
    """The shapes of the sweep: at most so many, evenly from all that are small; the smallest one if none is."""
    ordered = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    small = [s for s in ordered if s[0] * s[1] <= _SWEPT_ELEMENTS[device]] or ordered[:1]
    if len(small) <= _MOST_SHAPES:
        return tuple(small)
    return tuple(small[round(i * (len(small) - 1) / (_MOST_SHAPES - 1))] for i in range(_MOST_SHAPES))


def _written(folder: Folder, below: str, sources: dict[str, str], entry: Entry) -> Path:
    for name in (ENTRY, SPEC):
        if name in sources:
            raise UsageError(f"sources: expected no file named {name}, which is written beside them")
    root = folder.write({**sources, ENTRY: ENTRY_SOURCE, SPEC: entry.as_json()}, below)
    return root / ENTRY


def _never(*arguments: object, **options: object) -> None:
    """In place of a forward, which is in another process."""
    raise TypeError("this function is in another process")


def _write_trace(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"trace={one_line(path, 200)}: {one_line(str(reason), 200)}; expected a file to write"
        ) from None
