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
PACKAGES = loaded(ROOT / "docs" / "found" / "packages.py").PACKAGES
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
    for record in RECORDS.values():
        assert set(record["packages"]) == {package.key for package in PACKAGES}
        for package in PACKAGES:
            assert (ROOT / "docs" / "found" / "kernels" / f"call_{package.adapter}.py").is_file()
            assert record["packages"][package.key]["adapter"] == package.adapter


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
