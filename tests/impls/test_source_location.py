"""Where an implementation is defined: through whatever wraps it, as plain data from its process, and in the reports."""

from __future__ import annotations

import functools
import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import library

from normcheck.impls import source_location
from normcheck.impls.adapt import adapt
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels import interpreter
from normcheck.impls.source_location import NOWHERE, Place
from normcheck.isolation.select import select_apart
from tests.command_line import Cli
from tests.hostile_text import HARM

if not torch.cuda.is_available():
    interpreter.enable()  # before torch.compile and triton.jit import triton
import triton

HERE = __file__


def plain(x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    return x


def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return around


class Module(torch.nn.Module):
    def forward(self, x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
        return x


class Instance:
    def __call__(self, x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
        return x

    def method(self, x: Any) -> Any:
        return x


class Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x


def kernel(x: Any) -> None:
    pass


LINE = plain.__code__.co_firstlineno
WRAPPED: dict[str, tuple[Any, int]] = {
    "plain": (plain, LINE),
    "partial": (functools.partial(functools.partial(plain, 1), eps=1), LINE),
    "decorated": (decorator(decorator(plain)), LINE),
    "no_grad": (torch.no_grad()(plain), LINE),
    "module": (Module(), Module.forward.__code__.co_firstlineno),
    "instance": (Instance(), Instance.__call__.__code__.co_firstlineno),
    "method": (Instance().method, Instance.method.__code__.co_firstlineno),
    "autograd": (Gradient.apply, Gradient.forward.__code__.co_firstlineno),
    "triton": (triton.jit(kernel), kernel.__code__.co_firstlineno),
    "adapted": (adapt(plain)[0], LINE),
    "adapted module": (adapt(Module())[0], Module.forward.__code__.co_firstlineno),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_defined(name: str) -> None:
    function, line = WRAPPED[name]
    assert source_location.defined(function) == Place(HERE, line)


@pytest.mark.slow
def test_compiled() -> None:
    """By a test alone: ``torch.compile`` imports for seconds, in each process that collects this file."""
    assert source_location.defined(torch.compile(plain)) == Place(HERE, LINE)
    found = source_location.defined(torch.compile(Module()))
    assert found == Place(HERE, Module.forward.__code__.co_firstlineno)


def test_custom_op() -> None:
    @library.custom_op("normcheck_test::identity", mutates_args=())
    def identity(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert source_location.defined(identity).file == HERE


class Raises:
    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "error", error)

    def __getattribute__(self, name: str) -> Any:
        raise object.__getattribute__(self, "error")

    def __call__(self) -> None:
        pass


def endless() -> Any:
    def function() -> None:
        pass

    function.__wrapped__ = function  # type: ignore[attr-defined]
    return function


NOWHERE_AT_ALL = {
    "builtin": len,
    "torch's own": torch.rms_norm,
    "a class": int,
    "no function": 5,
    "raises": Raises(ValueError()),
    "exits": Raises(SystemExit()),
    "not code": SimpleNamespace(__code__=5, __wrapped__=None),
    "not a name": SimpleNamespace(__wrapped__=SimpleNamespace(__code__=SimpleNamespace(co_filename=HERE))),
    "no file": eval("lambda x: x"),
    "NUL": plain.__code__.replace(co_filename="a\x00b"),
}


@pytest.mark.parametrize("name", NOWHERE_AT_ALL)
def test_nothing_is_known(name: str) -> None:
    assert source_location.of(Implementation(name="a", op="rmsnorm", forward=NOWHERE_AT_ALL[name])) == NOWHERE


def test_a_function_that_wraps_itself() -> None:
    assert source_location.defined(endless()).file == HERE


def test_only_the_source_is_known() -> None:
    def of(source: str) -> Place:
        return source_location.of(Implementation(name="a", op="rmsnorm", forward=len, source=source))

    assert of(HERE) == Place(HERE, 1)
    assert of("https://example.org/a.py") == of("") == of("\x00.py") == NOWHERE


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        HERE,
        [HERE],
        [HERE, None],
        [HERE, "3"],
        [HERE, 0],
        [HERE, -1],
        [HERE, True],
        [HERE, 10**9],
        [HERE, 1.0],
        [HERE, 1, 2],
        [None, 1],
        {"file": HERE, "line": 1},
        [Path(HERE).name, 1],
        [str(Path(HERE).parent), 1],
        ["/" + "a/" * 10_000, 1],
        *([f"/{text}", 1] for text in HARM),
    ],
)
def test_what_is_no_place(told: object) -> None:
    assert source_location.place_of(told) == NOWHERE


def test_relative_to_the_current_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert source_location.relative(str(tmp_path / "a" / "b.py")) == "a/b.py"
    assert source_location.relative("/elsewhere/b.py") == "/elsewhere/b.py"
    assert source_location.relative("") == ""


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        (("/a.py:3 in f: g()", "/a.py:7 in g: h()", "/b.py:9 in h: raise"), 7),
        (("/a.py:3 in f: g()", "/a.py:7x in g", "/a.py: in g", "/a.py:7"), 7),
        (("/aa.py:3 in f", "a.py:3 in f", "/a.py:99999999999999999999 in f", "/a.py:\u0663 in f"), None),
        ((), None),
    ],
)
def test_line_in_a_traceback(frames: tuple[str, ...], line: int | None) -> None:
    assert source_location.line_in(Place("/a.py", 1), frames) == line
    assert source_location.line_in(NOWHERE, frames) is None


CODE = """
    import ast, functools, json
    from normcheck import Implementation


    def wrong(x, weight, bias, *, eps):
        return x.clone()


    def raises(x, weight, bias, *, eps):
        return deep(x)


    def deep(x):
        return json.loads("[" * 3 + "x" * x.shape[0], object_hook=int)


    def far(x, weight, bias, *, eps):
        return ast.literal_eval("[" * 20 + "x" + "]" * 20)  # raises far inside of somebody else's code


    IMPLEMENTATIONS = tuple(
        Implementation(name=f.__name__, op="rmsnorm", forward=functools.partial(f)) for f in (wrong, raises, far)
    )
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kernels" / "mine.py"
    path.parent.mkdir()
    path.write_text(textwrap.dedent(CODE), encoding="utf-8")
    return path


def line_of(path: Path, words: str) -> int:
    return next(i for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if words in line)


@pytest.mark.slow
def test_told_by_its_process(mine: Path) -> None:
    found = select_apart("kernels/mine.py", (), "cpu", 60.0)
    assert [source_location.of(i) for i in found] == [
        Place(str(mine), line_of(mine, f"def {name}(")) for name in ("wrong", "raises", "far")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("where", [("--no-isolation",), ("--isolation",)])
def test_a_run_says_where(mine: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]) -> None:
    for name in [name for name in os.environ if name.startswith("GITHUB_")]:
        monkeypatch.delenv(name)
    options = ("--device", "cpu", "--dtype", "fp32", "--no-contexts", "--max-examples", "4", *where)
    done = cli("verify", "--impl", "kernels/mine.py", *options, "--report", "json:x", "--report", "github:-")
    assert done.code == 1, done.err
    told = {v["implementation"]: v for v in json.loads(Path("x").read_text(encoding="utf-8"))["verdicts"]}
    for name, verdict in told.items():
        assert (verdict["file"], verdict["line"]) == ("kernels/mine.py", line_of(mine, f"def {name}("))
    lines = {name: verdict["failure"]["line"] for name, verdict in told.items()}
    assert lines["wrong"] is None
    assert lines["raises"] == line_of(mine, "return json")
    assert lines["far"] == line_of(mine, "return ast")
    for line in (told["wrong"]["line"], lines["raises"], lines["far"]):
        assert f"::error file=kernels/mine.py,line={line},title=" in done.out
