"""The tables of docs/found.md and a page for each package, from the records of golden/found/ and from defects.toml."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fingerprint
from fingerprint import OTHER_GPU, PASSED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "found.md"
RECORDS = {"gpu": "GPU", "cpu": "CPU"}
"""Record -> where it was made; in this order a defect's case is looked for."""

Records = dict[str, dict[str, Any]]
Entry = dict[str, Any]
Cells = dict[str, dict[str, list[Any]]]


def read(path: Path) -> dict[str, Any]:
    """A record, each dtype of a cell with all of its facts."""
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for package in record["packages"].values():
        if "cells" in package:
            package["cells"] = {cell: fingerprint.lowered(by) for cell, by in package["cells"].items()}
    return record


def records() -> Records:
    """The records by name."""
    return {name: read(ROOT / "golden" / "found" / f"{name}.json") for name in RECORDS}


def judged() -> dict[str, list[Entry]]:
    """``defect`` and ``limit`` of defects.toml."""
    return tomllib.loads((HERE / "defects.toml").read_text("utf-8"))


def cells_of(of: Records, name: str, package: str) -> Cells:
    """The cells of a package in a record."""
    cells: Cells = of[name]["packages"].get(package, {}).get("cells", {})
    return cells


def cells_at(of: Records, place: str, package: str) -> Cells:
    """The cells of a package in all records that were made on a GPU, or on a CPU."""
    found: Cells = {}
    for name in (name for name, there in RECORDS.items() if there == place):
        for cell, by in cells_of(of, name, package).items():
            found[cell] = {**by, **found.get(cell, {})}
    return found


def failed(by: dict[str, list[Any]], cell: str) -> dict[str, list[list[Any]]]:
    """Name of what failed in a cell, as defects.toml has it -> what is kept of it: the cell, or it and ``device``."""
    found: dict[str, list[list[Any]]] = {}
    for key, kept in by.items():
        if kept[0] == "fail":
            found.setdefault(f"{cell} {OTHER_GPU}" if key == OTHER_GPU else cell, []).append(kept)
    return found


def packages_of(entry: Entry) -> list[str]:
    """The versions of a package that a defect or limit is of: the one that it names, and those that are as wrong."""
    return [entry["package"], *entry.get("also", [])]


def failures(of: Records, entry: Entry) -> list[tuple[str, str, list[Any]]]:
    """(record, cell, what is kept of it) of each failure that a defect or limit names."""
    found = []
    for name in RECORDS:
        for package in packages_of(entry):
            there: dict[str, list[list[Any]]] = {}
            for cell, by in cells_of(of, name, package).items():
                there |= failed(by, cell)
            found += [(name, cell, kept) for cell in entry["cells"] for kept in there.get(cell, [])]
    return found


def name_of(package: str) -> str:
    """A package without its version."""
    return package.rpartition("-")[0]


def linked(*packages: str) -> str:
    """A package with its versions, as a link of docs/found.md to its page."""
    first, *others = packages
    return f"[{', '.join((first, *(version_of(other) for other in others)))}](found/{name_of(first)}.md)"


def version_of(package: str) -> str:
    """The version alone."""
    return package.rpartition("-")[2]


def defects(of: Records) -> str:
    """One row a defect."""
    rows = ["| | package | what happens | cause | upstream |", "|--|--|--|--|--|"]
    for number, defect in enumerate(judged()["defect"], 1):
        columns = (
            str(number),
            linked(*packages_of(defect)),
            defect["what"],
            f"`{defect['cause']}`",
            defect["upstream"],
        )
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows)


def limits(of: Records) -> str:
    """One line a limit."""
    return "\n".join(
        f"- {limit['package']}, {' and '.join(limit['cells'])}: {limit['what']}" for limit in judged()["limit"]
    )


def passed(of: Records) -> str:
    """The fingerprint of each cell that has one, of the dtypes in which it passed."""
    rows = [
        "| package | op | name | dtypes | convention | again | other rows | padding | graph | other GPU | tuned |",
        "|--|--|--|--|--|--|--|--|--|--|--|",
    ]
    packages = {package for name in RECORDS for package in of[name]["packages"]}
    numbers = {
        (package, cell): number
        for number, defect in enumerate(judged()["defect"], 1)
        for package in packages_of(defect)
        for cell in defect["cells"]
    }
    for package in sorted(packages, key=str.lower):
        for cell, by in sorted(cells_at(of, "GPU", package).items()):
            right = {dtype: kept for dtype, kept in by.items() if kept[0] in PASSED and dtype != OTHER_GPU}
            if not any(kept[3] for kept in right.values()):
                continue  # of a run that did not keep them
            op, name = cell.split()
            dtypes = ", ".join(f"{dtype} (thin)" if kept[0] == "thin" else dtype for dtype, kept in right.items())
            wrong = numbers.get((package, f"{cell} {OTHER_GPU}"))
            beside = by.get(OTHER_GPU, [""])[0]
            other = f"no: {wrong}" if wrong else {"pass": "yes", "fail": "no"}.get(beside, "not tried")
            columns = (op, name, dtypes, *columns_of([kept[3] for kept in right.values()]))
            rows.append(f"| {linked(package)} | {' | '.join((*columns[:-1], other, columns[-1]))} |")
    return "\n".join(rows)


def columns_of(facts: list[fingerprint.Facts]) -> tuple[str, ...]:
    """Convention, again, other rows, padding, graph and tuned: what the dtypes of a cell say together."""
    keys = dict.fromkeys(key for each in facts for key in each if key not in fingerprint.MEASURED)
    said = {key: dict.fromkeys(str(each[key]) for each in facts if key in each) for key in keys}
    convention = ", ".join(f"{key}={' or '.join(values)}" for key, values in said.items())
    bits = []
    for key in ("again", "rows", "padding"):
        other = dict.fromkeys(
            output for each in facts for output in each.get(key, "").split() if output != fingerprint.SAME
        )
        measured = any(key in each for each in facts)
        bits.append(f"{', '.join(other)} differ" if other else "same" if measured else "")
    graphs = dict.fromkeys(each["graph"] for each in facts if "graph" in each)
    graph = next((why for why in graphs if why != fingerprint.HELD), "yes" if graphs else "")
    tuned = [each["configurations"].split("/") for each in facts if "configurations" in each]
    configurations = f"{sum(int(n) for n, _ in tuned)}/{sum(int(n) for _, n in tuned)}" if tuned else ""
    each_m = "each M is compiled" * any(each.get("each_m") for each in facts)
    return convention, *bits, graph, ", ".join(filter(None, (configurations, each_m)))


def conventions(of: Records) -> str:
    """One line for each value of a convention that stands in the table, in words."""
    found: dict[str, None] = {}
    for package in of["gpu"]["packages"].values():
        for cell, by in package.get("cells", {}).items():
            for key, value in (
                (k, v) for kept in by.values() for k, v in (kept[3].items() if _has_facts(kept) else ())
            ):
                if key not in fingerprint.MEASURED:
                    found[f"- `{key}={value}`: {fingerprint.in_words(cell.split()[0], key, value)}"] = None
    return "\n".join(sorted(found))


def _has_facts(kept: list[Any]) -> bool:
    return len(kept) > 3 and isinstance(kept[3], dict)


def summary(of: Records) -> str:
    """How many defects, packages, and cells that passed."""
    entries = judged()["defect"]
    packages = {name_of(package) for name in RECORDS for package in of[name]["packages"]}
    wrong = {name_of(entry["package"]) for entry in entries}
    lines = [f"- {len(entries)} defects in {len(wrong)} of {len(packages)} packages, each confirmed in plain torch."]
    for name, place in RECORDS.items():
        here = of[name]["environment"]
        every = [by for package in of[name]["packages"].values() for by in package.get("cells", {}).values()]
        on = [kept[0] for by in every for dtype, kept in by.items() if dtype != OTHER_GPU]
        beside = [by[OTHER_GPU][0] for by in every if OTHER_GPU in by]
        tried = f" Beside another GPU {beside.count('pass')} passed, {beside.count('fail')} failed." * bool(beside)
        lines.append(
            f"- {place} ({here['device']}; torch {here['torch']}, Triton {here['triton']}): {on.count('pass')} cells"
            f" passed, {on.count('thin')} passed thin, {on.count('fail')} failed.{tried}"
        )
    return "\n".join(lines)


def not_run(of: Records) -> str:
    """One line for each package, or cell, that says nothing on a device."""
    lines = []
    for name, place in RECORDS.items():
        for package, kept in sorted(of[name]["packages"].items()):
            if "not_run" in kept:
                lines.append(f"- {package}, {place}: {kept['not_run']}")
                continue
            why: dict[str, list[str]] = {}
            for cell, by in kept["cells"].items():
                for dtype, values in by.items():
                    if values[0] == "error":
                        why.setdefault(values[3], []).append(f"{cell} {dtype}")
            lines += [f"- {package}, {place}, {', '.join(cells)}: {reason}" for reason, cells in why.items()]
    return "\n".join(lines)


TABLES = {
    "Found with normcheck": summary,
    "Defects": defects,
    "Limits": limits,
    "Fingerprints": passed,
    "Conventions": conventions,
    "What was not run": not_run,
}
"""Headings, and what makes the table or list under each."""

LINES = re.compile(r"^[|-][^\n]*(?:\n[|-][^\n]*)*$", re.MULTILINE)


def rendered(text: str, of: Records) -> str:
    """The page with the first table or list under each of these headings made anew. ValueError if there is none."""
    for heading, table in TABLES.items():
        before, mark, rest = text.partition(f"# {heading}\n")
        there = LINES.search(rest)
        if not mark or not there:
            raise ValueError(f"heading={heading!r}: expected it in {PAGE.name}, with a table or a list under it")
        text = f"{before}{mark}{rest[: there.start()]}{table(of)}{rest[there.end() :]}"
    return text


def pages(of: Records) -> dict[str, str]:
    """Name of a file beside this one -> the page of a package: its defects with their case lines, and what passed."""
    keys: dict[str, list[str]] = {}
    for package in sorted({key for record in of.values() for key in record["packages"]}):
        keys.setdefault(name_of(package), []).append(package)
    return {f"{name}.md": "\n".join(page(of, name, versions)) for name, versions in keys.items()}


def page(of: Records, name: str, versions: list[str]) -> Iterator[str]:
    """The lines of the page of a package."""
    adapters = {of[r]["packages"][v]["adapter"] for r in RECORDS for v in versions if v in of[r]["packages"]}
    yield f"# {name}"
    yield ""
    files = ", ".join(f"[call_{adapter}.py](kernels/call_{adapter}.py)" for adapter in sorted(adapters))
    numbers = ", ".join(map(version_of, versions))
    yield f"Versions {numbers}, called by {files}. See [found](../found.md)."
    own = [(n, d) for n, d in enumerate(judged()["defect"], 1) if {*packages_of(d)} & {*versions}]
    if own:
        yield from ("", "## Defects", "")
        for number, defect in own:
            yield from _told(of, number, defect)
    limits_here = [limit for limit in judged()["limit"] if limit["package"] in versions]
    if limits_here:
        yield from ("", "## Limits", "")
        yield from (f"- {e['package']}, {' and '.join(e['cells'])}: {e['what']}" for e in limits_here)
    rows = list(_rows(of, versions))
    if rows:
        yield from ("", "## What passed", "", "Cases on shapes.", "")
        yield from ("| version | op | adapter's name | GPU | CPU |", "|--|--|--|--|--|", *rows)
    yield ""


def _told(of: Records, number: int, defect: Entry) -> Iterator[str]:
    """A defect with the first case that showed it and what confirms it."""
    yield f"- **{number}.** {', '.join(packages_of(defect))}: {defect['what']}"
    yield f"  Cause: `{defect['cause']}`. Upstream: {defect['upstream']}."
    found = failures(of, defect)
    if found:
        where, cell, (*_, case) = found[0]
        adapter = of[where]["packages"][defect["package"]]["adapter"]
        context = f" --context {OTHER_GPU}" * cell.endswith(f" {OTHER_GPU}")
        line = f"normcheck repro docs/found/kernels/call_{adapter}.py:{cell.split()[1]} '{case}'{context}"
        yield f"  {RECORDS[where]}: `{line}`"
    else:
        yield "  No case of the record gets to it."
    yield f"  Confirmed by {', '.join(f'`{function}`' for function in defect['confirmed'])} in `tests/found/`."


def _rows(of: Records, versions: Iterable[str]) -> Iterator[str]:
    """One row for each cell that passed: cases and shapes by dtype."""
    for version in versions:
        there = [cells_at(of, place, version) for place in ("GPU", "CPU")]
        for cell in sorted({each for cells in there for each in cells}):
            columns = [_cases(cells.get(cell, {})) for cells in there]
            if any(columns):
                op, name = cell.split()
                yield f"| {version} | {op} | {name} | {' | '.join(columns)} |"


def _cases(by: dict[str, list[Any]]) -> str:
    return ", ".join(
        f"{dtype} {kept[1]} on {kept[2]}{' (thin)' if kept[0] == 'thin' else ''}"
        for dtype, kept in by.items()
        if kept[0] in PASSED and dtype != OTHER_GPU
    )


def write() -> None:
    """Write docs/found.md anew, and the page of each package."""
    of = records()
    PAGE.write_text(rendered(PAGE.read_text("utf-8"), of), encoding="utf-8")
    for name, text in pages(of).items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
