"""Runs normcheck on published norm kernels, records what it found, and writes the tables of docs/found.md.

    python docs/found/found.py --device cpu --max-examples 40
    python docs/found/found.py --device cuda --workers 14

Packages come from PyPI by pip, files of repositories from GitHub at a commit, by their SHA-256. Both are kept in
``--cache``, which is looked into first. Each package is run in processes of its own, with its folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import page  # noqa: E402
from packages import PACKAGES, File, Package  # noqa: E402

SCHEMA = "normcheck-found/1"
DEFAULT_CACHE = Path(os.environ.get("NORMCHECK_FOUND", Path.home() / ".cache" / "normcheck-found"))


def fetch(file: File, folder: Path) -> None:
    """Save ``file`` in ``folder``, up to its line ``until``. ValueError if its SHA-256 is another."""
    with urllib.request.urlopen(file.url, timeout=60) as answer:
        text = answer.read()
    digest = hashlib.sha256(text).hexdigest()
    if digest != file.sha256:
        raise ValueError(f"url={file.url}: sha256={digest}; expected {file.sha256}")
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shortened(text, file.until))


def shortened(text: bytes, until: str) -> bytes:
    """``text`` without what follows the first line that begins with ``until``."""
    lines = text.splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if until and line.startswith(until.encode())]
    return b"".join(lines[: ends[0]] if ends else lines)


def install(package: Package, cache: Path, wheels: Path | None) -> Path:
    """Its folder of the cache, filled if it was not there. CalledProcessError if pip fails."""
    folder = cache / package.key
    if folder.is_dir():
        return folder
    part = cache / f".{package.key}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    place = ["--no-index", "--find-links", str(wheels)] if wheels else []
    environment = {**os.environ, **dict(package.environment)}
    into_part = ["install", "-q", *place, "--target", str(part)]
    if package.files:
        for file in package.files:
            fetch(file, part)
    elif package.source:
        with tempfile.TemporaryDirectory() as into:
            options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", into]
            subprocess.run([*pip, "download", "-q", *place, *options, package.pinned], check=True, env=environment)
            with tarfile.open(next(Path(into).glob("*.tar.gz"))) as archive:
                archive.extractall(into, filter="data")
            unpacked = next(path for path in Path(into).iterdir() if path.is_dir())
            for name in unpacked.iterdir():
                if (name / "__init__.py").is_file():
                    shutil.copytree(name, part / name.name)
    else:
        alone = [] if package.needs and not package.beside else ["--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, *into_part, *alone, package.pinned], check=True)
    if package.beside:
        alone = [] if package.needs else ["--no-deps"]
        subprocess.run([*pip, *into_part, *alone, *package.beside], check=True)
    part.rename(folder)
    return folder


def verify(package: Package, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The entry of ``package`` in the record: its cells, or why it was not run."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            sys.executable,
            "-m",
            "normcheck",
            "verify",
            "--impl",
            str(HERE / "kernels" / f"call_{package.adapter}.py"),
        ]
        command += ["--device", given.device, "--time-budget", str(given.time_budget), "--workers", str(given.workers)]
        command += ["--allow-thin", "--timeout", "60", "--report", f"json:{report}"]
        if given.max_examples:
            command += ["--max-examples", str(given.max_examples)]
        for dtype in given.dtype:
            command += ["--dtype", dtype]
        path = os.pathsep.join((str(folder), str(ROOT)))
        environment = {**os.environ, "PYTHONPATH": path}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=scratch)
        if given.logs:
            given.logs.mkdir(parents=True, exist_ok=True)
            (given.logs / f"{package.key}.txt").write_text(ran.stdout + ran.stderr, encoding="utf-8")
            if report.is_file():
                shutil.copy(report, given.logs / f"{package.key}.json")
        if not report.is_file():
            last = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:]
            return {"adapter": package.adapter, "not_run": "".join(last).replace(str(HERE), "docs/found")}
        return entry(package, json.loads(report.read_text(encoding="utf-8")))


def entry(package: Package, report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a report: for each cell and dtype its status, cases and shapes, and of a finding what it was."""
    cells: dict[str, dict[str, list[Any]]] = {}
    for verdict in report["verdicts"]:
        if verdict["status"] == "skip":
            continue
        kept = [verdict["status"], verdict["cases"], verdict["shapes"]]
        if failure := verdict["failure"]:
            kept += [failure["kind"], failure["output"], failure["case"]]
        elif verdict["status"] == "error":
            kept.append((verdict["detail"] or verdict["error"])[:120])
        cells.setdefault(f"{verdict['op']} {verdict['implementation']}", {})[verdict["dtype"]] = kept
    return {"adapter": package.adapter, "cells": cells}


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Install and run what was asked for -> the record."""
    chosen = [p for p in PACKAGES if not given.only or p.key in given.only or p.name in given.only]

    def one(package: Package) -> tuple[str, dict[str, Any]]:
        began = time.monotonic()
        try:
            folder = install(package, given.cache, given.wheels)
            result = verify(package, folder, given)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            result = {"adapter": package.adapter, "not_run": f"not installed: {error}"[:200]}
        told = result.get("not_run") or " ".join(cell[0] for of in result["cells"].values() for cell in of.values())
        print(f"{package.key} ({time.monotonic() - began:.0f} s): {told}", flush=True)
        return package.key, result

    with ThreadPoolExecutor(given.jobs) as pool:
        return dict(pool.map(one, chosen))


def environment() -> dict[str, str]:
    """Versions, and the device."""
    import torch
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, Triton's interpreter"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": device}


def written(record: dict[str, Any]) -> str:
    """The record as JSON, one cell a line."""
    lines = [
        f' "{key}": {json.dumps(record[key])},\n' for key in ("schema", "environment", "profile", "seconds_a_cell")
    ]
    packages = []
    for key, of in sorted(record["packages"].items()):
        if "not_run" in of:
            packages.append(f'  "{key}": {json.dumps(of)}')
            continue
        cells = ",\n".join(f'   "{cell}": {json.dumps(by)}' for cell, by in of["cells"].items())
        packages.append(f'  "{key}": {{"adapter": "{of["adapter"]}", "cells": {{\n{cells}}}}}')
    return "{\n" + "".join(lines) + ' "packages": {\n' + ",\n".join(packages) + "\n }\n}\n"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", action="append", default=[], help="a package's name, or name-version; may repeat")
    parser.add_argument("--dtype", action="append", default=[], help="may repeat; default: all three")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--wheels", type=Path, help="folder of wheels, in place of PyPI")
    parser.add_argument("--time-budget", type=float, default=5, help="seconds a cell")
    parser.add_argument("--max-examples", type=int, help="cases a cell; default: all that the profile wants")
    parser.add_argument("--workers", type=int, default=1, help="cells of a package side by side")
    parser.add_argument("--jobs", type=int, default=1, help="packages side by side")
    parser.add_argument("--record", type=Path, help="JSON file to write, or to renew where --only is given")
    parser.add_argument("--logs", type=Path, help="folder for normcheck's output and whole reports")
    return parser.parse_args()


def main() -> None:
    """Run, write the record, and unless it is a file of its own, the tables of the page."""
    given = options()
    given.cache = given.cache.resolve()
    found = run(given)
    path = given.record or ROOT / "golden" / "found" / ("cpu.json" if given.device == "cpu" else "h200.json")
    if given.only and path.is_file():
        found = {**json.loads(path.read_text(encoding="utf-8"))["packages"], **found}
    record = {
        "schema": SCHEMA,
        "environment": environment(),
        "profile": "quick",
        "seconds_a_cell": given.time_budget,
        "packages": found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written(record), encoding="utf-8")
    if not given.record:
        page.PAGE.write_text(page.rendered(page.PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
