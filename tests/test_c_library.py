"""C sources are compiled once, and what others could have written is not loaded; without a compiler nothing is."""

from __future__ import annotations

import ctypes
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from normcheck import c_library
from normcheck.cases import inputs
from normcheck.cases.case import Case
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.oracle import judging
from normcheck.oracle.fused import on_cpu, trial
from normcheck.oracle.judge import judge_of
from normcheck.oracle.tolerances import table

TEXT = "int twice(const struct numbers *n) { *(int64_t *)n->to = n->value * TWO; return 0; }\n"
BEFORE = (*c_library.definitions({"TWO": 2}), c_library.structure("numbers", ["to", "value"]))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "twice.c"
    path.write_text(TEXT, encoding="utf-8")
    return path


def anew(path: Path) -> ctypes.CDLL | None:
    return c_library.loaded.__wrapped__(path, BEFORE)  # type: ignore[no-any-return]


def twice(library: ctypes.CDLL | None, value: int) -> int:
    assert library is not None
    to = torch.zeros(1, dtype=torch.int64)
    c_library.call(library, "twice", (to.data_ptr(), value))
    return int(to)


def test_a_source_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert twice(anew(source), 21) == 42
    (kept,) = c_library.kept()
    monkeypatch.setattr(c_library, "_compile", None)
    assert twice(anew(source), 4) == 8
    assert Path(kept).stat().st_mode & 0o077 == 0
    assert list(Path(kept).parent.iterdir()) == [Path(kept)]


def test_of_several_that_ask_at_once_one_compiles(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, right = [], c_library._compile
    monkeypatch.setattr(c_library, "_compile", lambda *given: (compiled.append(given), time.sleep(0.2), right(*given)))
    with ThreadPoolExecutor(4) as pool:
        assert [twice(library, 5) for library in pool.map(anew, [source] * 4)] == [10] * 4
    assert len(compiled) == 1


def test_another_source_or_compiler_is_compiled_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anew(source)
    source.write_text(TEXT.replace("TWO", "3"), encoding="utf-8")
    assert twice(anew(source), 2) == 6
    monkeypatch.setattr(c_library, "_build", lambda compiler: "another")
    assert twice(anew(source), 3) == 9
    assert len(c_library.kept()) == 3


@pytest.mark.parametrize("whose", ["folder", "library", "link"])
def test_what_others_could_have_written_is_not_loaded(source: Path, whose: str) -> None:
    anew(source)
    (kept,) = map(Path, c_library.kept())
    if whose == "link":
        kept.rename(kept.with_suffix(".real"))
        kept.symlink_to(kept.with_suffix(".real"))
    else:
        (kept.parent if whose == "folder" else kept).chmod(0o777)
    assert anew(source) is None


def test_what_cannot_be_compiled_is_not_there(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("this is no C\n", encoding="utf-8")
    assert anew(source) is None
    monkeypatch.setattr(c_library, "_compiler", lambda: None)
    assert anew(source) is None


def test_a_compiler_that_does_not_end_is_ended(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("cc", timeout)

    monkeypatch.setattr(subprocess, "run", never)
    assert anew(source) is None


def test_without_memory_it_says_so(source: Path) -> None:
    source.write_text("int none(const struct numbers *n) { return 1; }\n", encoding="utf-8")
    library = anew(source)
    assert library is not None
    with pytest.raises(MemoryError, match="none"):
        c_library.call(library, "none", (0, 0))


def test_without_a_compiler_all_is_as_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain way makes the same inputs, and the plain judge finds the same."""
    op, case = OPS["layernorm"], Case(op="layernorm", dtype="bf16", M=5, N=300, rows="blend", seed=4)
    kernel = trial.right_kernel(op, case, make(case, op, "cpu"))

    def found() -> tuple[list[tuple[str, str]], list[float]]:
        judge = judge_of(op, case, make(case, op, "cpu"), table().model, {}, fused=True)
        assert judging.can_be_fused(judge, kernel.outputs) == (c_library._compiler() is not None)
        checked, saved = judging.judge_forward(judge, kernel.outputs)
        checked += judging.judge_gradients(judge, kernel.gradients, saved, given=False)
        return [(c.output, c.check) for c in checked], [c.comparison.ratio for c in checked]

    names, ratios = found()
    for cached in (c_library.loaded, inputs._kernel_fits, judging.kernels_work):
        cached.cache_clear()
    monkeypatch.setattr(c_library, "_compiler", lambda: None)
    try:
        assert not on_cpu.works()
        assert found() == (names, pytest.approx(ratios, rel=trial.SLIVER))
    finally:
        for cached in (c_library.loaded, inputs._kernel_fits, judging.kernels_work):
            cached.cache_clear()
