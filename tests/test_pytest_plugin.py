"""The plugin for pytest, in a repository that is not this one: kernels that are right, wrong, thin, crashing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree as ET

import pytest

import normcheck
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES
from normcheck.pytest_plugin import CellTest

DOCS = Path(__file__).parents[1] / "docs"
KERNEL = """
import torch

def rmsnorm(x, weight, bias, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""
TESTS = """
import os
import pytest
import my_kernels
from normcheck import Implementation

FEW = {"dtypes": ("fp16",), "shapes": ((5, 7), (3, 33))}
ONLY_FP16 = Implementation(name="mine", op="rmsnorm", forward=my_kernels.rmsnorm, **FEW)

@pytest.mark.normcheck(time_budget=0.01, contexts=False)
def test_right():
    return ONLY_FP16

thin = pytest.mark.normcheck(op="rmsnorm", dtypes="fp16", max_examples=3, contexts=False)(my_kernels.rmsnorm)

@pytest.mark.normcheck(op="rmsnorm", dtypes=("fp16", "float32"), time_budget=0.1, contexts=False)
def wrong(x, weight, bias, eps):
    return my_kernels.rmsnorm(x, weight, bias, eps) * 1.01

@pytest.mark.normcheck(op="rmsnorm", dtypes="fp16")
def crashing(x, weight, bias, eps):
    os.abort()

def test_plain():
    pass
"""


def repository(folder: Path, tests: str = TESTS) -> None:
    """A repository with a kernel, tests of it, and a configuration of its own."""
    (folder / "my_kernels.py").write_text(KERNEL, encoding="utf-8")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_kernels.py").write_text(tests, encoding="utf-8")
    config = '[tool.pytest.ini_options]\naddopts = "--strict-markers"\npythonpath = ["."]\n'
    (folder / "pyproject.toml").write_text(config, encoding="utf-8")


def pytest_there(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "normcheck.pytest_plugin", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_each_kind_of_kernel_under_xdist_with_junit_and_what_failed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path)
    done = pytest_there(tmp_path, "-n", "1", "--junitxml", "out.xml", "-v")  # each process imports torch twice
    by_name = {name: status for status, name in re.findall(r"\] (\w+) tests/test_kernels.py::(\S+)", done.stdout)}
    assert by_name == {
        "test_right[fp16]": "PASSED",
        "test_right[bf16]": "SKIPPED",
        "test_right[fp32]": "SKIPPED",
        "thin[fp16]": "FAILED",
        "wrong[fp16]": "FAILED",
        "wrong[fp32]": "FAILED",
        "crashing[fp16]": "FAILED",
        "test_plain": "PASSED",
    }, done.stdout + done.stderr
    texts = {
        case.attrib["name"]: failure.text or ""
        for case in ET.parse(tmp_path / "out.xml").iter("testcase")
        if (failure := case.find("failure")) is not None
    }
    assert texts.keys() == {name for name, status in by_name.items() if status == "FAILED"}
    wrong = texts["wrong[fp16]"]
    assert "FAIL rmsnorm test_kernels.py:wrong fp16: y is wrong (end to end)" in wrong and "Worst element" in wrong
    assert "Reproduce: normcheck repro tests/test_kernels.py:wrong 'rmsnorm fp16 M=" in wrong and "█" in wrong
    assert "crashed its process" in texts["crashing[fp16]"] and "SIGABRT" in texts["crashing[fp16]"]
    assert texts["thin[fp16]"].startswith("THIN ") and "Traceback" not in texts["thin[fp16]"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    kept = ("-c", "pyproject.toml", "--rootdir=.", "-p", "normcheck.pytest_plugin", "-p", "no:xdist")
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):  # in this process: torch is imported already
        code = pytest.main(
            [*kept, "--import-mode=importlib", "--lf", "-k", "thin or plain", "-o", "normcheck_thin=warn"]
        )
    assert code == 0 and "1 passed, 3 deselected, 1 warning" in out.getvalue(), out.getvalue()
    assert "ThinCell: THIN  1 of 1 cell thin" in out.getvalue()


@pytest.mark.slow
def test_a_run_that_marks_no_kernel_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test_it(): assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n", encoding="utf-8"
    )
    done = pytest_there(tmp_path, "--strict-markers", "-q")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


class Inner:
    """pytest in this process, in a folder with the kernel: torch is imported already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("my_kernels.py", KERNEL)

    def write(self, name: str, source: str) -> None:
        (self.folder / name).write_text(dedent(source), encoding="utf-8")
        sys.modules.pop(name.removesuffix(".py"), None)

    def run(self, *argv: str) -> tuple[int, str]:
        """The exit code and the output."""
        plugins = ("-p", "normcheck.pytest_plugin", "-p", "no:xdist", "-p", "no:cacheprovider")
        with redirect_stdout(StringIO()) as out, redirect_stderr(out):
            code = pytest.main([*plugins, "-s", "--import-mode=importlib", "-c", os.devnull, "--rootdir=.", *argv])
        return code, out.getvalue()


@pytest.fixture
def inner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return Inner(tmp_path)


@pytest.mark.slow
def test_options_come_before_the_mark(inner: Inner) -> None:
    inner.write(
        "test_it.py",
        """
        import pytest, my_kernels
        few = {"max_examples": 1, "time_budget": 0.01, "contexts": False}
        @pytest.mark.normcheck(op="rmsnorm", dtypes="fp16", seed=1, profile="deep", **few)
        def test_it():
            return lambda x, w, b, eps: my_kernels.rmsnorm(x, w, b, eps) * 2
        """,
    )
    assert "\ndeep profile, seed 1;" in inner.run()[1]
    assert "\nci profile, seed 7;" in inner.run("--normcheck-seed", "7", "--normcheck-profile", "ci")[1]


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("@pytest.mark.normcheck(op='rmsnorm', dtypes='fp8')\ndef k(x, w, eps): ...", "dtypes=fp8: expected one of"),
        ("@pytest.mark.normcheck('rmsnorm')\ndef k(x, w, eps): ...", "expected op=..., dtypes=... by name"),
        ("@pytest.mark.normcheck(op='no', dtypes='fp16')\ndef test_k(): return len", "op=no: expected one of"),
        ("@pytest.mark.normcheck(op='rmsnorm', dtypes='fp16')\ndef test_k(): pass", "fn=None: expected a function"),
        (
            "@pytest.mark.normcheck(op='rmsnorm', dtype='fp16')\ndef test_k(): return len",
            "dtype='fp16': expected dtypes",
        ),
        (
            "class TestIt:\n    @pytest.mark.normcheck(op='rmsnorm')\n    def k(self, x, w, eps): ...",
            "k: expected a kernel that is a function of a module",
        ),
        ("import normcheck\nnormcheck.cells('none.py')", "none.py: "),
    ],
)
def test_what_is_wrong_with_a_mark_is_said(inner: Inner, tests: str, said: str) -> None:
    inner.write("test_it.py", f"import pytest\n{tests}")
    code, out = inner.run()
    assert code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert said in out


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--normcheck-profile", "fast"), "normcheck-profile=fast: expected one of quick, ci, deep"),
        (("-o", "normcheck_thin=maybe"), "normcheck_thin=maybe: expected one of fail, warn"),
    ],
)
def test_a_wrong_option_is_said(inner: Inner, option: tuple[str, str], said: str) -> None:
    inner.write(
        "test_it.py", "import pytest\n@pytest.mark.normcheck(op='rmsnorm', dtypes='fp16')\ndef test_k(): return len"
    )
    code, out = inner.run(*option)
    assert code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR)
    assert said in out


def test_a_dtype_that_is_named_and_not_there_fails(inner: Inner) -> None:
    inner.write(
        "test_it.py",
        """
        import pytest, my_kernels
        from normcheck import Implementation
        mine = Implementation(name="mine", op="rmsnorm", forward=my_kernels.rmsnorm, dtypes=("fp16",))
        @pytest.mark.normcheck(dtypes="bf16")
        def test_it(): return mine
        """,
    )
    _, out = inner.run()
    assert "1 failed" in out and "required mine did not run rmsnorm" in out


def test_a_kernel_under_two_names_and_with_other_marks_is_one_test(inner: Inner) -> None:
    inner.write(
        "test_it.py",
        """
        import pytest
        from my_kernels import rmsnorm
        test_rmsnorm = pytest.mark.skip(reason="later")(pytest.mark.normcheck(op="rmsnorm", dtypes="fp16")(rmsnorm))
        """,
    )
    assert re.search(r"^=+ 1 skipped[ ,]", inner.run("-m", "normcheck")[1], re.MULTILINE)


@pytest.mark.slow
def test_the_page_does_what_it_says(inner: Inner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the README's kernel, right and wrong. Few cases are thin; a test above passes with a whole core."""
    few = replace(PROFILES["quick"], max_examples=25, shrink_seconds=0.0)
    monkeypatch.setitem(PROFILES, "quick", few)
    readme, page = ((DOCS / name).read_text(encoding="utf-8") for name in ("../README.md", "pytest.md"))
    blocks = dict(re.findall(r"^```python\n# (.*?\.py).*?\n(.*?)^```$", readme + page, re.MULTILINE | re.DOTALL))
    wrong, tests = blocks["my_rmsnorm.py"], blocks["test_my_kernels.py"]
    ((old, new),) = re.findall(r"^```diff\n-(.*)\n\+(.*)\n```$", readme, re.MULTILINE)
    (argument,) = re.findall(r'^pytest test_my_kernels.py -k "(.*)"$', page, re.MULTILINE)
    inner.write("test_my_kernels.py", tests)
    inner.write("my_rmsnorm.py", wrong.replace(old, new))
    thin = ("-o", "normcheck_thin=warn")
    assert "2 passed, 4 deselected" in inner.run("test_my_kernels.py", "-k", "gemma or declares", *thin)[1]
    inner.write("my_rmsnorm.py", wrong)
    inner.write("test_my_kernels.py", tests)
    _, out = inner.run("test_my_kernels.py", "-k", argument)
    assert "3 failed, 3 deselected" in out
    assert "Might be: eps is added outside the root" in out


def test_cells_of_nothing_are_refused_and_a_cell_is_checked_without_the_plugin() -> None:
    import_module("normcheck.isolation.worker")  # as another test of this process may
    with pytest.raises(UsageError, match=r"none.py"):
        normcheck.cells("none.py")
    with pytest.raises(pytest.fail.Exception, match="op=no: expected one of"):
        CellTest(len, "no", "fp16").check()
