"""The difference between two records: what moved between versions or devices, by output, in ulps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from normcheck.cases.tensor_names import GRADIENTS, ROOT_FIRST
from normcheck.errors import UsageError
from normcheck.golden.results import CellChange, Difference, Moved
from normcheck.golden.schema import BITMASK, FED, GIVEN, Record, RecordedCase
from normcheck.golden.store import read
from normcheck.oracle.bitmask import unpack
from normcheck.oracle.distance import moved
from normcheck.result import CellKey

_Cases = Mapping[tuple[str, str], RecordedCase]
_ORDER = (*ROOT_FIRST, *(GIVEN + name for name in GRADIENTS))


def difference(a: str, b: str) -> Difference:
    """What moved from the record in folder ``a`` to that in ``b``. Raises UsageError if one cannot be read."""
    return difference_of((read(Path(a)), read(Path(b))), (a, b))


def difference_of(records: tuple[Record, Record], folders: tuple[str, str]) -> Difference:
    """What moved from the first record to the second, whose ``folders`` name them in reports."""
    before, after = ({entry.key: entry for entry in record.entries} for record in records)
    pairs: dict[CellKey, list[tuple[RecordedCase, RecordedCase]]] = {}
    for key, entry in before.items():
        if key in after:
            pairs.setdefault(entry.cell, []).append((entry, after[key]))
    cells = [_change(key, both) for key, both in pairs.items()]
    return Difference(
        folders=folders,
        facts=_facts(*records),
        cells=tuple(sorted(cells, key=lambda cell: cell.key.op)),
        only=(_only(before, after), _only(after, before)),
    )


def _only(own: _Cases, other: _Cases) -> dict[CellKey, int]:
    """Cell -> the number of its cases that ``other`` lacks."""
    return dict(Counter(entry.cell for key, entry in own.items() if key not in other))


def _facts(before: Record, after: Record) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys((*before.environment, *after.environment))
    pairs = {name: (before.environment.get(name, ""), after.environment.get(name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass
class _Sum:
    """How one output of a cell moved, added up case by case."""

    elements: int = 0
    total: int = 0
    cases: int = 0
    ulps: float = -1.0
    case: str = ""


def _change(key: CellKey, pairs: list[tuple[RecordedCase, RecordedCase]]) -> CellChange:
    sums: dict[str, _Sum] = {}
    notes: dict[str, None] = {}
    for before, after in pairs:
        if before.inputs != after.inputs:
            raise UsageError(f"case={str(before.case)!r}: the two records have other inputs; expected the same bits")
        notes.update(dict.fromkeys(_notes(before, after)))
        for output in _ORDER:
            if output in before.tensors and output in after.tensors:
                own = sums.setdefault(output, _Sum())
                elements, total, ulps = _moved(output, before.tensors[output], after.tensors[output], before.case.N)
                own.elements += elements
                own.total += total
                own.cases += bool(elements)
                if elements and ulps > own.ulps:
                    own.ulps, own.case = ulps, str(before.case)
    return CellChange(
        key=key,
        cases=len(pairs),
        moved=tuple(
            Moved(
                output=output,
                elements=own.elements,
                total=own.total,
                cases=own.cases,
                ulps=None if output == BITMASK else own.ulps,
                case=own.case,
            )
            for output in _ORDER
            if output in sums and (own := sums[output]).elements
        ),
        notes=tuple(notes),
    )


def _notes(before: RecordedCase, after: RecordedCase) -> Iterator[str]:
    """Differences that are not in values: a refusal, an output, a problem or a declaration of only one record."""
    for name in ("refused", "gradients_refused"):
        was, now = getattr(before, name), getattr(after, name)
        if bool(was) != bool(now):
            yield f"{name.replace('_', ' ')} only in the {'first' if was else 'second'}: {was or now}"
    outputs = [{n for n in entry.tensors if not n.startswith((GIVEN, FED))} for entry in (before, after)]
    if not (before.refused or after.refused):
        for name in sorted(outputs[0] ^ outputs[1]):
            yield f"{name} only in the {'first' if name in outputs[0] else 'second'}"
    for name in ("declared", "reads", "backward", "problems"):
        if getattr(before, name) != getattr(after, name) and not (before.refused or after.refused):
            yield f"{name} is not the same"


def _moved(output: str, before: Tensor, after: Tensor, n: int) -> tuple[int, int, float]:
    """(elements that moved, elements, the largest distance in ulps); the elements of a bitmask are its bits."""
    if output == BITMASK:
        bits = [t if t.dtype == torch.bool else unpack(t, n) for t in (before, after)]
        return int((bits[0] != bits[1]).sum()), bits[0].numel(), 1.0
    changed, ulps = moved(before, after)
    return int(changed.sum()), before.numel(), ulps
