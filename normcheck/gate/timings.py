"""What the cells of a run will take, by the report of an earlier run, and the shard that each is given to by that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from normcheck.gate.plan import Plan
from normcheck.reports.json_reader import read
from normcheck.result import CellKey


def timed(plan: Plan, file: str) -> Plan:
    """``plan`` with the seconds that its cells took in the run of the report ``file``. Raises UsageError.

    One of several shards gets whole cells, instead of every N-th case of each: no first call is made twice.
    """
    keys = [cell.key for cell in plan.cells]
    expected = expected_seconds(file, keys)
    plan = replace(plan, expected_seconds=expected)
    number, count = plan.shard
    if count == 1:
        return plan
    own = shares(keys, expected, count)[number - 1]
    return replace(plan, shard=(1, 1), elsewhere=frozenset(keys) - own)


def expected_seconds(file: str, keys: Sequence[CellKey]) -> dict[CellKey, float]:
    """Cell -> seconds. One that the report lacks, or skipped, takes as long as the mean of the others."""
    took = {v.key: v.seconds for v in read(file).verdicts if v.status != "skip"}
    known = [took[key] for key in keys if key in took]
    mean = sum(known) / len(known) if known else 1.0
    return {key: took.get(key, mean) for key in keys}


def shares(keys: Sequence[CellKey], seconds: Mapping[CellKey, float], count: int) -> list[frozenset[CellKey]]:
    """The cells of each of ``count`` shards: the longest first, each to the shard that has least to do so far.

    Every shard computes the same, whatever machine it is on. The longest shard takes at most 4/3 of the shortest time
    that is possible (Graham 1969).
    """
    parts: list[list[CellKey]] = [[] for _ in range(count)]
    load = [0.0] * count
    for key in sorted(keys, key=lambda key: (-seconds[key], key.words)):
        least = load.index(min(load))
        parts[least].append(key)
        load[least] += seconds[key]
    return list(map(frozenset, parts))
