"""docs/found.md says what the records say, and each defect is confirmed without normcheck where its package is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
CONFIRMATIONS = Path(__file__).with_name("confirm.py")
CACHE = Path(os.environ.get("NORMCHECK_FOUND", Path.home() / ".cache" / "normcheck-found"))


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"found_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PAGE = loaded(ROOT / "docs" / "found" / "page.py")
FOUND = loaded(ROOT / "docs" / "found" / "found.py")
sys.path.remove(str(FOUND.HERE))
PACKAGES = FOUND.PACKAGES
sys.path.insert(0, str(CONFIRMATIONS.parent))
PACKAGE_OF: dict[str, tuple[str, bool]] = loaded(CONFIRMATIONS).PACKAGE
sys.path.remove(str(CONFIRMATIONS.parent))
RECORDS, JUDGED = PAGE.records(), PAGE.judged()
DEFECTS = JUDGED["defect"] + JUDGED["unrecorded"]


def test_the_page_has_the_tables_of_the_records() -> None:
    text = PAGE.PAGE.read_text("utf-8")
    assert PAGE.rendered(text) == text, "python docs/found/page.py writes them anew"


def test_there_are_enough_defects_in_enough_packages() -> None:
    assert len(JUDGED["defect"]) >= 25
    assert len({defect["package"].rpartition("-")[0] for defect in JUDGED["defect"]}) >= 12


def test_each_failed_cell_is_a_defect_or_a_limit_and_is_named_once() -> None:
    failed = {
        (package, cell)
        for record in RECORDS.values()
        for package, of in record["packages"].items()
        for cell, by in of.get("cells", {}).items()
        if any(kept[0] == "fail" for kept in by.values())
    }
    named = [(e["package"], cell) for e in JUDGED["defect"] + JUDGED["limit"] for cell in e["cells"]]
    assert sorted(named) == sorted(failed)


def test_each_defect_is_confirmed_and_each_confirmation_is_of_a_defect() -> None:
    named = {name: defect["package"] for defect in DEFECTS for name in defect["confirmed"]}
    assert named == {name: package for name, (package, _) in PACKAGE_OF.items()}
    assert all(defect["confirmed"] and ":" in defect["cause"] and defect["upstream"] for defect in DEFECTS)


def test_the_records_are_of_the_packages_that_are_installed_today() -> None:
    """What came after the records has defects without a case line."""
    later = {defect["package"] for defect in JUDGED["unrecorded"]}
    on_a_gpu = {**RECORDS["h200"]["packages"], **RECORDS["h100"]["packages"]}
    for packages in (on_a_gpu, RECORDS["h100"]["packages"], RECORDS["cpu"]["packages"]):
        assert set(packages) <= {package.key for package in PACKAGES}
    for package in PACKAGES:
        assert (ROOT / "docs" / "found" / "kernels" / f"call_{package.adapter}.py").is_file()
        for packages in (on_a_gpu, RECORDS["cpu"]["packages"]):
            assert package.key in later or packages[package.key]["adapter"] == package.adapter


def test_again_runs_what_is_thin_an_error_or_missing() -> None:
    cells = [("rmsnorm", name, dtype) for name in ("one", "two", "three") for dtype in ("fp16", "bf16", "fp32")]
    kept = {
        "rmsnorm one": {"fp16": ["pass", 300, 20], "bf16": ["thin", 3, 2], "fp32": ["fail", 1, 1, "mismatch", "y", ""]},
        "rmsnorm two": {"fp16": ["pass", 300, 20], "bf16": ["error", 0, 0, "no memory"], "fp32": ["pass", 9, 9]},
    }
    parts = FOUND.left(PACKAGES[0], [*cells, ("layernorm", "one", "bf16")], kept)
    assert [(part.op, part.names, part.dtypes) for part in parts] == [
        ("rmsnorm", ("one", "two"), ("bf16",)),
        ("rmsnorm", ("three",), ("fp16", "bf16", "fp32")),
        ("layernorm", ("one",), ("bf16",)),
    ]


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        (["thin", 3, 2], ["pass", 100, 6], False),
        (["thin", 3, 2], ["thin", 80, 5], False),
        (["thin", 80, 5], ["thin", 3, 2], True),
        (["pass", 100, 6], ["thin", 200, 5], True),
        (["pass", 100, 6], ["fail", 1, 1, "mismatch", "y", "case"], False),
        (["fail", 1, 1, "mismatch", "y", "case"], ["pass", 400, 90], True),
        (["fail", 1, 1, "mismatch", "y", "confirmed"], ["fail", 9, 3, "mismatch", "y", "another"], True),
        (["thin", 3, 2], ["error", 0, 0, "no memory"], True),
    ],
)
def test_of_two_runs_of_a_cell_the_one_that_says_more_is_kept(before: list, after: list, stays: bool) -> None:
    other = {"fp32": ["pass", 9, 9]}
    old = {"adapter": "liger", "cells": {"rmsnorm liger": {"fp16": before}, "layernorm liger": other}}
    new = {"adapter": "liger", "cells": {"rmsnorm liger": {"fp16": after, "bf16": ["thin", 1, 1]}}}
    cells = FOUND.merged(old, new)["cells"]
    assert cells["rmsnorm liger"] == {"fp16": before if stays else after, "bf16": ["thin", 1, 1]}
    assert cells["layernorm liger"] == other


def test_what_was_not_run_again_stays_as_it_was() -> None:
    old, not_run = {"adapter": "liger", "cells": {}}, {"adapter": "liger", "not_run": "not finished"}
    assert FOUND.merged(old, not_run) == old
    assert FOUND.merged(None, not_run) == not_run
    new = {"adapter": "liger", "cells": {"rmsnorm liger": {"fp16": ["pass", 9, 9]}}}
    assert FOUND.merged(not_run, new) == new


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGE_OF)
def test_confirmed(name: str) -> None:
    package, gpu = PACKAGE_OF[name]
    folder = CACHE / package
    if not folder.is_dir():
        pytest.skip(f"{package} is not in {CACHE}: python docs/found/found.py --only {package}")
    if gpu and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(CONFIRMATIONS), name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    if done.stdout.startswith("skip: "):
        pytest.skip(done.stdout.splitlines()[0].removeprefix("skip: "))
    assert done.stdout.splitlines()[-1:] == ["confirmed"], done.stderr
