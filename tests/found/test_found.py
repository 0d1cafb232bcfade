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


FOUND = loaded(ROOT / "docs" / "found" / "found.py")
sys.path.remove(str(FOUND.HERE))
PAGE, PACKAGES = FOUND.page, FOUND.PACKAGES
sys.path.insert(0, str(CONFIRMATIONS.parent))
PACKAGE_OF: dict[str, tuple[str, bool]] = loaded(CONFIRMATIONS).PACKAGE
sys.path.remove(str(CONFIRMATIONS.parent))
RECORDS, DEFECTS, LIMITS = PAGE.records(), PAGE.judged()["defect"], PAGE.judged()["limit"]


def test_the_pages_have_the_tables_of_the_records() -> None:
    text = PAGE.PAGE.read_text("utf-8")
    assert PAGE.rendered(text, RECORDS) == text, "python docs/found/page.py writes them anew"
    there = {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "found").glob("*.md")}
    assert PAGE.pages(RECORDS) == there, "python docs/found/page.py writes them anew; what is too many goes"


def test_there_are_enough_defects_in_enough_packages() -> None:
    assert len(DEFECTS) >= 75
    assert len({PAGE.name_of(defect["package"]) for defect in DEFECTS}) >= 20


def test_each_failed_cell_is_a_defect_or_a_limit_and_is_named_once() -> None:
    failed = {
        (package, name)
        for record in RECORDS.values()
        for package, of in record["packages"].items()
        for cell, by in of.get("cells", {}).items()
        for name in PAGE.failed(by, cell)
    }
    named = [(package, cell) for e in DEFECTS + LIMITS for package in PAGE.packages_of(e) for cell in e["cells"]]
    assert sorted(named) == sorted(failed)


def test_each_defect_is_confirmed_and_each_confirmation_is_of_a_defect() -> None:
    named = {name: defect["package"] for defect in DEFECTS for name in defect["confirmed"]}
    assert named == {name: package for name, (package, _) in PACKAGE_OF.items()}
    assert all(defect["confirmed"] and ":" in defect["cause"] and defect["upstream"] for defect in DEFECTS)


def test_the_records_are_of_the_packages_that_are_installed_today() -> None:
    known = {package.key: package.adapter for package in PACKAGES}
    on_a_gpu = (set(RECORDS[name]["packages"]) for name, place in PAGE.RECORDS.items() if place == "GPU")
    assert set().union(*on_a_gpu) == set(known)
    for record in RECORDS.values():
        assert {key: of["adapter"] for key, of in record["packages"].items()}.items() <= known.items()
    for adapter in known.values():
        assert (ROOT / "docs" / "found" / "kernels" / f"call_{adapter}.py").is_file()


def test_a_record_that_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    """Facts that all dtypes of a cell share stand in it once."""
    cells = {
        "rmsnorm one": {
            "fp16": ["pass", 300, 20, {"again": "same", "sum": "exact"}],
            "fp32": ["thin", 9, 3, {"again": "same"}],
            "device": ["fail", 8, 2, "context", "y", "case"],
        },
        "rmsnorm two": {"fp16": ["fail", 1, 1, "mismatch", "y", "case"]},
    }
    record = {
        "schema": FOUND.SCHEMA,
        "environment": {},
        "profile": "quick",
        "seconds_a_cell": 5,
        "packages": {"a-1": {"adapter": "a", "cells": cells}, "b-1": {"adapter": "b", "not_run": "why"}},
    }
    FOUND.written(tmp_path / "record.json", record)
    assert PAGE.read(tmp_path / "record.json") == record
    assert (tmp_path / "record.json").read_text("utf-8").count("again") == 1


def test_a_fingerprint_says_what_a_report_says() -> None:
    words = "norms the sum in fp32, before it is stored, as flashinfer and quack do"
    verdict = {
        "op": "fused_add_rmsnorm",
        "notes": ["another note", words],
        "model": {},
        "repeats": {"y": {"differ": 0, "cases": 9}, "dw": {"differ": 2, "cases": 9}},
        "invariance": {"y": {"differ": 0, "cases": 4}, "dw": {"differ": 1, "cases": 4}},
        "contexts": {
            "device": {"status": "not tried", "cases": 0, "why": "one GPU"},
            "graph": {"status": "held", "cases": 3, "why": ""},
            "autocast": {"status": "told", "cases": 1, "why": "another  dtype"},
            "stream": {"status": "held", "cases": 3, "why": ""},
        },
        "configurations": {"judged": 11, "allowed": 12, "cannot": {}, "why": "time"},
        "ran": [{"built": None}, {"built": 1}, {"built": 2}],
    }
    facts = FOUND.fingerprint.facts(verdict)
    assert facts == {
        "sum": "exact",
        "again": "dw",
        "rows": "same",
        "padding": "dw",
        "graph": "held",
        "contexts": {"autocast": "another dtype"},
        "configurations": "11/12",
        "each_m": True,
    }
    assert FOUND.fingerprint.in_words("fused_add_rmsnorm", "sum", "exact") == words
    columns = PAGE.columns_of([facts, {"again": "same", "graph": "held", "configurations": "12/12"}])
    assert columns == ("sum=exact", "dw differ", "same", "dw differ", "yes", "23/24, each M is compiled")


def test_another_gpu_is_tried_with_one_dtype_that_passed() -> None:
    kept = {
        "rmsnorm one": {"fp16": ["fail", 1, 1, "mismatch", "y", ""], "bf16": ["thin", 3, 2, {}]},
        "rmsnorm two": {"fp16": ["pass", 300, 20, {}], "device": ["pass", 8, 2, {}]},
        "rmsnorm three": {"fp16": ["error", 0, 0, "no memory"]},
    }
    (part,) = FOUND.untried(PACKAGES[0], kept)
    assert (part.op, part.names, part.dtypes, part.other_gpu) == ("rmsnorm", ("one",), ("bf16",), True)
    assert FOUND.on_other_gpu({"bf16": ["fail", 8, 2, "context", "y", "case"]})["device"][0] == "fail"
    assert FOUND.on_other_gpu({"bf16": ["fail", 8, 2, "mismatch", "y", "case"]}) == {}


def test_jobs_share_the_cores_and_begin_at_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    queue = FOUND.shares(3)
    shares = [queue.get() for _ in range(3)]
    assert [sorted(share.cores) for share in shares] == [[0, 1], [2, 3], [4, 5]]
    assert [share.gpus for share in shares] == [("3", "5"), ("5", "3"), ("3", "5")]
    assert shares[1].with_one_gpu.gpus == ("5",)


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
