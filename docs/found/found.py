"""Runs normcheck on published norm kernels, records what it found, and writes the tables of docs/found.md.

    python docs/found/found.py --device cpu --max-examples 40
    python docs/found/found.py --device cuda --jobs 4 --workers 12
    python docs/found/found.py --device cuda --again --jobs 4 --workers 3
    python docs/found/found.py --device cuda --other-gpu --jobs 12

Packages come from PyPI by pip, files of repositories from GitHub at a commit, by their SHA-256. Both are kept in
``--cache``, which is looked into first. Each package is run in processes of its own, with its folder on PYTHONPATH.

``--again`` runs the cells of the record that are thin, that ended in an error, or that are not in it. Of the two runs
of a cell the one that says more is kept. With ``--within`` it can be called until nothing is left. Each of the
``--jobs`` has its own cores and one GPU, so ``--other-gpu``, which wants two, is a run of its own: one dtype of each
cell that passed is tried in the context ``device``.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import fingerprint  # noqa: E402
import page  # noqa: E402
from fingerprint import OTHER_GPU, PASSED  # noqa: E402
from packages import PACKAGES, File, Package  # noqa: E402
from shares import Share, shares  # noqa: E402

SCHEMA = "normcheck-found/2"
SAYS = ("error", "thin", "pass", "fail")
"""What a cell's status says of the kernel, the least first."""

SETTLED = SAYS[2:]
END_SECONDS = 30.0
"""Within which a normcheck that is asked to stop has written its report."""

DEFAULT_CACHE = Path(os.environ.get("NORMCHECK_FOUND", Path.home() / ".cache" / "normcheck-found"))


@dataclass(frozen=True)
class Part:
    """What one normcheck runs of a package: all, or these implementations of an op in these dtypes."""

    package: Package
    op: str = ""
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    other_gpu: bool = False

    @property
    def label(self) -> str:
        """Its name among the logs."""
        return "-".join(filter(None, (self.package.key, self.op, *self.dtypes, OTHER_GPU * self.other_gpu)))

    @property
    def cells(self) -> int:
        """How many cells it has, 0 if it is all of the package."""
        return len(self.names) * len(self.dtypes)


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
    compileall.compile_dir(part, quiet=2)  # a kernel's process may write no bytecode, and would compile it each time
    part.rename(folder)
    return folder


def verify(part: Part, folder: Path, given: argparse.Namespace, until: float, share: Share) -> dict[str, Any]:
    """The entry of the package in the record: its cells, or why it was not run. ``until``, ``share``: see ``_ran``."""
    adapter = HERE / "kernels" / f"call_{part.package.adapter}.py"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "normcheck", "verify"]
        for spec in [f"{adapter}:{name}" for name in part.names] or [str(adapter)]:
            command += ["--impl", spec]
        command += ["--device", given.device, "--allow-thin", "--timeout", "60", "--report", f"json:{report}"]
        if part.other_gpu:
            command += ["--context", OTHER_GPU, "--configs", "won", "--max-examples", "8", "--workers", "1"]
        else:
            command += ["--time-budget", str(given.time_budget), "--workers", str(given.workers)]
        if given.max_examples and not part.other_gpu:
            command += ["--max-examples", str(given.max_examples)]
        if part.op:
            command += ["--op", part.op]
        for dtype in part.dtypes or given.dtype:
            command += ["--dtype", dtype]
        out, err = _ran(command, folder, scratch, until, share if part.other_gpu else share.with_one_gpu)
        if given.logs:
            given.logs.mkdir(parents=True, exist_ok=True)
            (given.logs / f"{part.label}.txt").write_text(out + err, encoding="utf-8")
            if report.is_file():
                shutil.copy(report, given.logs / f"{part.label}.json")
        if not report.is_file():
            last = (err.strip() or out.strip()).splitlines()[-1:]
            words = "".join(last).replace(str(HERE), "docs/found")
            return {"adapter": part.package.adapter, "not_run": words or "it ended without a report"}
        found = entry(part.package, json.loads(report.read_text(encoding="utf-8")))
        if part.other_gpu:
            found["cells"] = {cell: on_other_gpu(by) for cell, by in found["cells"].items()}
        return found


def _ran(
    command: list[str], folder: Path, scratch: str, until: float = math.inf, share: Share | None = None
) -> tuple[str, str]:
    """What the command wrote, with ``folder`` on its path, and its ``share`` of the machine, or all.

    At the time ``until`` it is asked to stop, as by Ctrl-C.
    """
    path = filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if share:
        command = ["taskset", "-c", ",".join(map(str, sorted(share.cores))), *command]
    if share and share.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=scratch) as process:
        try:
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            return process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            return process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()


def entry(package: Package, report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a report: for each cell and dtype its status, cases and shapes, of a finding what it was, and of
    a pass its fingerprint."""
    cells: dict[str, dict[str, list[Any]]] = {}
    for verdict in report["verdicts"]:
        if verdict["status"] == "skip":
            continue
        kept = [verdict["status"], verdict["cases"], verdict["shapes"]]
        if failure := verdict["failure"]:
            kept += [failure["kind"], failure["output"], failure["case"]]
        elif verdict["status"] == "error":
            kept.append((verdict["detail"] or verdict["error"])[:120])
        else:
            kept.append(fingerprint.facts(verdict))
        cells.setdefault(f"{verdict['op']} {verdict['implementation']}", {})[verdict["dtype"]] = kept
    return {"adapter": package.adapter, "cells": cells}


def on_other_gpu(by: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What is kept of a cell that was run in the context ``device`` alone, if it was tried there."""
    ((status, cases, shapes, *finding),) = by.values()
    if status == "fail" and finding[0] == "context":
        return {OTHER_GPU: [status, cases, shapes, *finding]}
    return {OTHER_GPU: ["pass", cases, shapes]} if status in PASSED else {}


def claimed(package: Package, folder: Path, device: str) -> list[tuple[str, str, str]]:
    """(op, name, dtype) of each cell that its adapter has on the device. ValueError if it cannot be imported."""
    adapter = HERE / "kernels" / f"call_{package.adapter}.py"
    with tempfile.TemporaryDirectory() as scratch:
        out, err = _ran([sys.executable, str(HERE / "claimed.py"), str(adapter), device], folder, scratch)
    try:
        found = json.loads("".join(out.splitlines()[-1:]))
    except ValueError:
        raise ValueError("".join(err.strip().splitlines()[-1:]) or "its adapter says nothing") from None
    return [(op, name, dtype) for op, name, dtypes in found for dtype in dtypes]


def left(package: Package, cells: Iterable[tuple[str, str, str]], kept: dict[str, dict[str, list[Any]]]) -> list[Part]:
    """What is to be run again of these ``cells``, of which ``kept`` has the record: what is not settled, and no more.

    Implementations of an op that lack the same dtypes are one part, so that none of their cells is run in vain.
    """
    lacking: dict[tuple[str, str], tuple[str, ...]] = {}
    for op, name, dtype in cells:
        status, *_ = kept.get(f"{op} {name}", {}).get(dtype, ("",))
        if status not in SETTLED:
            lacking[op, name] = (*lacking.get((op, name), ()), dtype)
    parts: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
    for (op, name), dtypes in lacking.items():
        parts[op, dtypes] = (*parts.get((op, dtypes), ()), name)
    return [Part(package, op, names, dtypes) for (op, dtypes), names in parts.items()]


def untried(package: Package, kept: dict[str, dict[str, list[Any]]]) -> list[Part]:
    """The cells that passed in a dtype, the first of them, and have not been called beside another GPU."""
    parts: dict[tuple[str, str], tuple[str, ...]] = {}
    for cell, by in kept.items():
        right = [dtype for dtype, values in by.items() if values[0] in PASSED]
        if right and OTHER_GPU not in by:
            op, name = cell.split()
            parts[op, right[0]] = (*parts.get((op, right[0]), ()), name)
    return [Part(package, op, names, (dtype,), other_gpu=True) for (op, dtype), names in parts.items()]


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The entry of a package that was run again: of each cell what says more, of two alike the one with more cases.

    A case line that failed stays, since it was confirmed. What was not run this time stays as it was.
    """
    if old is None or "not_run" in new:
        return old or new
    cells = {cell: dict(by) for cell, by in old.get("cells", {}).items()}
    for cell, by in new["cells"].items():
        for dtype, values in by.items():
            before = cells.setdefault(cell, {}).get(dtype)
            if before is None or _says(values) > _says(before):
                cells[cell][dtype] = values
    return {"adapter": new["adapter"], "cells": cells}


def _says(values: list[Any]) -> tuple[int, int]:
    status, cases, *_ = values
    return SAYS.index(status), 0 if status == "fail" else cases


def run(given: argparse.Namespace, recorded: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Install and run what was asked for, and ``keep`` the packages of the record, of which ``recorded`` were there."""
    chosen = [p for p in PACKAGES if not given.only or p.key in given.only or p.name in given.only]
    until = time.monotonic() + given.within if given.within else math.inf
    found = dict(recorded) if given.again or given.other_gpu else {}
    free = shares(given.jobs)

    def parts_of(package: Package) -> list[Part]:
        """What is to be run of it; [] with a message if it cannot be installed or imported."""
        try:
            folder = install(package, given.cache, given.wheels)
            kept = recorded.get(package.key, {}).get("cells", {})
            if given.other_gpu:
                return untried(package, kept)
            if not given.again:
                return [Part(package)]
            cells = claimed(package, folder, given.device)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            found.setdefault(package.key, {"adapter": package.adapter, "not_run": f"not installed: {error}"[:200]})
            print(f"{package.key}: {error}", flush=True)
            return []
        wanted = [cell for cell in cells if not given.dtype or cell[2] in given.dtype]
        return left(package, wanted, kept)

    def one(part: Part) -> tuple[str, dict[str, Any]]:
        share, began = free.get(), time.monotonic()
        if began >= until:
            result: dict[str, Any] = {"adapter": part.package.adapter, "not_run": "not finished"}
        else:
            result = verify(part, given.cache / part.package.key, given, until, share)
        free.put(share)
        told = result.get("not_run") or " ".join(cell[0] for of in result["cells"].values() for cell in of.values())
        print(f"{part.label} ({time.monotonic() - began:.0f} s): {told}", flush=True)
        return part.package.key, result

    with ThreadPoolExecutor(given.jobs) as pool:
        parts = [part for several in pool.map(parts_of, chosen) for part in several]
        for done in as_completed([pool.submit(one, part) for part in parts]):
            key, result = done.result()
            found[key] = merged(found.get(key), result)
            keep({**recorded, **found})


def environment() -> dict[str, str]:
    """Versions, and the device."""
    import torch
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, Triton's interpreter"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": device}


def written(path: Path, record: dict[str, Any]) -> None:
    """Write the record as JSON, one cell a line."""
    lines = [
        f' "{key}": {json.dumps(record[key])},\n' for key in ("schema", "environment", "profile", "seconds_a_cell")
    ]
    packages = []
    for key, of in sorted(record["packages"].items()):
        if "not_run" in of:
            packages.append(f'  "{key}": {json.dumps(of)}')
            continue
        hoisted = {cell: json.dumps(fingerprint.hoisted(by)) for cell, by in of["cells"].items()}
        cells = ",\n".join(f'   "{cell}": {by}' for cell, by in hoisted.items())
        packages.append(f'  "{key}": {{"adapter": "{of["adapter"]}", "cells": {{\n{cells}}}}}')
    text = "{\n" + "".join(lines) + ' "packages": {\n' + ",\n".join(packages) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", action="append", default=[], help="a package's name, or name-version; may repeat")
    parser.add_argument(
        "--again", action="store_true", help="only cells that the record lacks, or has thin or as errors"
    )
    parser.add_argument(
        "--other-gpu", action="store_true", help="only the context device, of cells that passed, on two GPUs or more"
    )
    parser.add_argument("--dtype", action="append", default=[], help="may repeat; default: all three")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--wheels", type=Path, help="folder of wheels, in place of PyPI")
    parser.add_argument("--time-budget", type=float, default=5, help="seconds a cell")
    parser.add_argument("--max-examples", type=int, help="cases a cell; default: all that the profile wants")
    parser.add_argument("--workers", type=int, default=1, help="cells of a package side by side")
    parser.add_argument("--jobs", type=int, default=1, help="parts of packages side by side, one for each GPU")
    parser.add_argument("--within", type=float, help="seconds after which all is stopped; what was finished is kept")
    parser.add_argument("--record", type=Path, help="JSON file to write, or to renew with --only or --again")
    parser.add_argument("--logs", type=Path, help="folder for normcheck's output and whole reports")
    return parser.parse_args()


def main() -> None:
    """Run, write the record, and unless it is a file of its own, the tables of the page."""
    given = options()
    given.cache = given.cache.resolve()
    here, recorded, seconds = environment(), {}, given.time_budget
    path = given.record or ROOT / "golden" / "found" / f"{'cpu' if given.device == 'cpu' else 'gpu'}.json"
    if (given.only or given.again or given.other_gpu) and path.is_file():
        before = page.read(path)
        if before["environment"] != here:
            sys.exit(f"{path}: of {before['environment']}, and here is {here}; --record names another file")
        recorded, seconds = before["packages"], max(seconds, before["seconds_a_cell"])
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": SCHEMA, "environment": here, "profile": "quick", "seconds_a_cell": seconds}
    run(given, recorded, lambda packages: written(path, {**record, "packages": packages}))
    if not given.record:
        page.write()


if __name__ == "__main__":
    main()
