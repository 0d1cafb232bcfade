"""The fingerprint of a cell that passed: which convention its kernel has, and what a caller may rely on."""

from __future__ import annotations

from typing import Any

from normcheck.cases.ops import OPS
from normcheck.oracle.conventions import words_of
from normcheck.result import SUMS

Facts = dict[str, Any]
"""Name of a fact -> what a report says of it."""

OTHER_GPU = "device"
"""Key of a cell, beside its dtypes: how it did with another GPU than the current one."""

SAME, HELD = "same", "held"
PASSED = ("pass", "thin")
MEASURED = ("again", "rows", "padding", "graph", "contexts", "configurations", "each_m")
"""The facts that are no convention."""


def facts(verdict: dict[str, Any]) -> Facts:
    """What a verdict of a JSON report says of a kernel, besides that it is right. Keys:

    one for each convention that its op leaves open, found or declared (``sum``, ``rounding`` ...); ``again``: whether a
    case gave the same bits once more; ``rows``: whether a row did among other rows; ``padding``: whether dw and db did
    with padding rows; ``graph``: whether it held in a CUDA graph; ``contexts``: which others it did not hold in;
    ``configurations``: how many of those that its autotuners allow were judged; ``each_m``: each new M is compiled.
    """
    found = convention(verdict)
    invariance = verdict["invariance"]
    for name, counts in (
        ("again", verdict["repeats"]),
        ("rows", {output: n for output, n in invariance.items() if output not in SUMS}),
        ("padding", {output: n for output, n in invariance.items() if output in SUMS}),
    ):
        if counts:
            found[name] = " ".join(output for output, n in counts.items() if n["differ"]) or SAME
    contexts = dict(verdict["contexts"])
    contexts.pop("device", None)
    graph = contexts.pop("graph", None)
    if graph:
        found["graph"] = HELD if graph["status"] == HELD and not graph["why"] else _plain(graph["why"])
    others = {name: how["why"] for name, how in contexts.items() if how["status"] != HELD}
    if others:
        found["contexts"] = {name: _plain(why) for name, why in others.items()}
    if tuned := verdict["configurations"]:
        found["configurations"] = f"{tuned['judged']}/{tuned['allowed']}"
    built = [ran["built"] for ran in verdict["ran"] if ran["built"] is not None]
    if len(built) > 1 and all(built):
        found["each_m"] = True
    return found


def convention(verdict: dict[str, Any]) -> Facts:
    """The keys that the op leaves open, with the value that all cases fitted, or that the kernel declares."""
    found = {}
    for key, words in words_of(OPS[verdict["op"]]).items():
        said = [str(value) for value, text in words.items() if text in verdict["notes"]]
        value = verdict["model"].get(key) or "".join(said[:1])
        if value:
            found[key] = value
    return found


def in_words(op: str, key: str, value: str) -> str:
    """What a kernel of ``op`` does that has this value of a convention."""
    of_key = {str(each): text for each, text in words_of(OPS[op]).get(key, {}).items()}
    return of_key.get(value, "declared")


def _plain(why: str) -> str:
    """A reason without what differs from run to run, and not longer than a table has room for."""
    return " ".join(why.split())[:90]


def hoisted(by: dict[str, list[Any]]) -> dict[str, Any]:
    """A cell of the record with the facts that all of its dtypes share named once, as ``facts``."""
    own = [kept[3] for dtype, kept in by.items() if _is_right(dtype, kept)]
    shared = {key: value for key, value in own[0].items() if all(each.get(key) == value for each in own)} if own else {}
    rest: dict[str, Any] = {}
    for dtype, kept in by.items():
        if _is_right(dtype, kept):
            left = {key: value for key, value in kept[3].items() if key not in shared}
            kept = [*kept[:3], left] if left else kept[:3]
        rest[dtype] = kept
    return {**rest, "facts": shared} if shared else rest


def lowered(cell: dict[str, Any]) -> dict[str, list[Any]]:
    """The opposite of ``hoisted``: each dtype that passed has all of its facts."""
    shared = cell.get("facts", {})
    by = {dtype: kept for dtype, kept in cell.items() if dtype != "facts"}
    return {
        dtype: [*kept[:3], {**shared, **(kept[3] if len(kept) > 3 else {})}] if _is_right(dtype, kept) else kept
        for dtype, kept in by.items()
    }


def _is_right(dtype: str, kept: list[Any]) -> bool:
    return kept[0] in PASSED and dtype != OTHER_GPU
