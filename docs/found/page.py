"""The tables of docs/found.md, from the records of golden/found/ and from defects.toml."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import fingerprint

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "found.md"
RECORDS = ("h200", "h100", "cpu")
"""In this order a defect's case is looked for."""

GPUS = ("h100", "h200")
"""The records of GPUs. The first one is the later one: a cell that both have is shown as it was there."""


def read(path: Path) -> dict[str, Any]:
    """A record, each dtype of a cell with all of its facts."""
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for package in record["packages"].values():
        if "cells" in package:
            package["cells"] = {cell: fingerprint.lowered(by) for cell, by in package["cells"].items()}
    return record


def records() -> dict[str, dict[str, Any]]:
    """The records by name."""
    return {name: read(ROOT / "golden" / "found" / f"{name}.json") for name in RECORDS}


def judged() -> dict[str, list[dict[str, Any]]]:
    """``defect`` and ``limit`` of defects.toml."""
    return tomllib.loads((HERE / "defects.toml").read_text("utf-8"))


def failures(of: dict[str, dict[str, Any]], entry: dict[str, Any]) -> list[tuple[str, str, list[Any]]]:
    """(record, cell, what is kept of it) of each failed cell that a defect or limit names."""
    found = []
    for name in RECORDS:
        cells = of[name]["packages"].get(entry["package"], {}).get("cells", {})
        for cell in entry["cells"]:
            found += [(name, cell, kept) for kept in cells.get(cell, {}).values() if kept[0] == "fail"]
    return found


def defects(of: dict[str, dict[str, Any]]) -> str:
    """One row a defect, with the first case that showed it."""
    rows = ["| | package | what happens | case | cause | upstream |", "|--|--|--|--|--|--|"]
    for number, defect in enumerate(judged()["defect"], 1):
        where, cell, (*_, case) = failures(of, defect)[0]
        adapter = of[where]["packages"][defect["package"]]["adapter"]
        repro = f"`normcheck repro docs/found/kernels/call_{adapter}.py:{cell.split()[1]} '{case}'`"
        device = "GPU" if where in GPUS else "CPU"
        columns = (str(number), defect["package"], defect["what"], f"{device}: {repro}", f"`{defect['cause']}`")
        rows.append(f"| {' | '.join(columns)} | {defect['upstream']} |")
    return "\n".join(rows)


def unrecorded(of: dict[str, dict[str, Any]]) -> str:
    """One line for each defect that has a confirmation and no case line."""
    return "\n".join(
        f"- {one['package']}: {one['what']} `{one['cause']}`; upstream: {one['upstream']}."
        for one in judged()["unrecorded"]
    )


def limits(of: dict[str, dict[str, Any]]) -> str:
    """One line a limit."""
    return "\n".join(
        f"- {limit['package']}, {' and '.join(limit['cells'])}: {limit['what']}" for limit in judged()["limit"]
    )


def passed(of: dict[str, dict[str, Any]]) -> str:
    """How many passed, and how many of these are thin; one row for each cell that did: cases and shapes by dtype."""
    rows = ["| package | op | adapter's name | GPU: cases on shapes | CPU |", "|--|--|--|--|--|"]
    gpus = ", ".join(f"{name.upper()}: {_how_many(of[name])}" for name in GPUS)
    rows.append(f"| *all* | | | {gpus} | {_how_many(of['cpu'])} |")
    for package in sorted({key for record in of.values() for key in record["packages"]}):
        cells = {name: of[name]["packages"].get(package, {}).get("cells", {}) for name in RECORDS}
        for cell in sorted({each for found in cells.values() for each in found}):
            later, earlier, cpu = (cells[name].get(cell, {}) for name in (*GPUS, "cpu"))
            columns = [_passed({**earlier, **later}), _passed(cpu)]
            if any(columns):
                op, name = cell.split()
                rows.append(f"| {package} | {op} | {name} | {' | '.join(columns)} |")
    return "\n".join(rows)


def _how_many(record: dict[str, Any]) -> str:
    cells = [cell for package in record["packages"].values() for cell in package.get("cells", {}).values()]
    found = [values[0] for by in cells for values in by.values()]
    return f"{found.count('pass')} passed, {found.count('thin')} passed thin"


def _passed(by: dict[str, list[Any]]) -> str:
    return ", ".join(
        f"{dtype} {kept[1]} on {kept[2]}{' (thin)' if kept[0] == 'thin' else ''}"
        for dtype, kept in by.items()
        if kept[0] in ("pass", "thin")
    )


def not_run(of: dict[str, dict[str, Any]]) -> str:
    """One line for each package, or cell, that says nothing on a device."""
    lines = []
    for name in RECORDS:
        for package, kept in sorted(of[name]["packages"].items()):
            place = "CPU" if name == "cpu" else name.upper()
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
    "Defects": defects,
    "Without a case line": unrecorded,
    "Limits": limits,
    "What passed": passed,
    "What was not run": not_run,
}
"""Headings, and what makes the table or list under each."""

LINES = re.compile(r"^(?:\| |\|--|- )[^\n]*(?:\n(?:\| |\|--|- )[^\n]*)*$", re.MULTILINE)


def rendered(text: str) -> str:
    """The page with the first table or list under each of these headings made anew. ValueError if there is none."""
    of = records()
    for heading, table in TABLES.items():
        before, mark, rest = text.partition(f"# {heading}\n")
        there = LINES.search(rest)
        if not mark or not there:
            raise ValueError(f"heading={heading!r}: expected it in {PAGE.name}, with a table or a list under it")
        text = f"{before}{mark}{rest[: there.start()]}{table(of)}{rest[there.end() :]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text("utf-8")), encoding="utf-8")
