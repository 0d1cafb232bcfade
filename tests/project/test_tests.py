"""Tests that could not fail: all that they assert stands in a loop that may have nothing to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.inner_loop import parametrize
from tests.some import some

FILES = sorted(Path(__file__).parents[1].rglob("test_*.py"))
OF_ITS_ARGUMENTS = ("enumerate", "sorted", "list", "tuple", "reversed", "product", "zip", "items", "values", "keys")


def is_sure(things: ast.expr) -> bool:
    """Whether a loop over ``things`` runs at least once: a literal, a constant, a range, what ``some`` has looked at,
    or what is made of nothing else.
    """
    match things:
        case ast.Tuple() | ast.List() | ast.Set() | ast.Constant():
            return bool(getattr(things, "elts", True))
        case ast.Dict():
            return bool(things.keys)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
        case ast.Call(func=ast.Name(id="some" | "range") | ast.Attribute(attr="product", value=_)) if not things.args:
            return False
        case ast.Call(func=ast.Name(id="some" | "range")):
            return True
        case ast.Call(func=ast.Attribute(attr=name, value=of), args=[]) if name in OF_ITS_ARGUMENTS:
            return is_sure(of)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in OF_ITS_ARGUMENTS:
            strict = any(
                keyword.arg == "strict" and ast.unparse(keyword.value) == "True" for keyword in things.keywords
            )
            each = [is_sure(argument) for argument in things.args if not isinstance(argument, ast.Constant)]
            first = each[:1] if name == "enumerate" else each
            return bool(first) and (any(first) if strict else all(first))
    return False


def checks(body: list[ast.stmt], loops: tuple[ast.expr, ...] = ()) -> Iterator[tuple[ast.expr, ...]]:
    """For each check in a function the loops around it."""
    for node in body:
        match node:
            case ast.Assert():
                yield loops
            case ast.Expr(value=ast.Call(func=called)) if ast.unparse(called).split(".")[-1].startswith("assert_"):
                yield loops
            case ast.For():
                yield from checks(node.body, (*loops, node.iter))
            case ast.With():
                if any("raises" in ast.unparse(item.context_expr) for item in node.items):
                    yield loops
                yield from checks(node.body, loops)
            case ast.If() | ast.Try():
                yield from checks([*node.body, *node.orelse], loops)


def idle(source: str) -> list[str]:
    """The tests in ``source`` that check something, but nothing outside of loops that may be empty."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            around = list(checks(node.body))
            if around and not any(all(map(is_sure, loops)) for loops in around):
                found.append(f"{node.name}: {ast.unparse(around[0][-1])}")
    return found


@pytest.mark.slow
def test_a_test_checks_something_whatever_it_loops_over() -> None:
    """Loop over ``some(...)``, from ``tests.some``, or assert something else."""
    found = {path.name: idle(path.read_text(encoding="utf-8")) for path in FILES}
    assert found and {name: tests for name, tests in found.items() if tests} == {}


LOOPS = {
    "x": False,
    "some(x)": True,
    "some()": False,
    "range(3)": True,
    "()": False,
    "(1, 2)": True,
    "{}": False,
    "NAMES": True,
    "module.NAMES.items()": True,
    "found.items()": False,
    "NAMES[1:]": False,
    "enumerate(NAMES, turn)": True,
    "enumerate(found, 1)": False,
    "product(NAMES, repeat=size)": True,
    "zip(NAMES, found)": False,
    "zip(NAMES, found, strict=True)": True,
}


@pytest.mark.parametrize("things", LOOPS)
def test_what_a_loop_surely_enters(things: str) -> None:
    source = f"def test_it():\n    for x in {things}:\n        if x:\n            assert x"
    assert (idle(source) == []) is LOOPS[things]
    assert idle(source + "\n    assert found") == []


def test_something_is_something() -> None:
    assert some(number for number in range(2)) == [0, 1]
    with pytest.raises(AssertionError, match="loop over"):
        some([])


def test_the_inner_loop_has_the_first_rows_of_a_table_and_the_whole_suite_all() -> None:
    for names, table in (("x", [(1, 2), (3, 4), 5]), ("x, y", [(1, 2), pytest.param(3, 4, id="last"), (5, 6)])):
        rows = parametrize(names, table, inner=1).args[1]
        assert rows[0] == table[0]
        assert [[mark.name for mark in row.marks] for row in rows[1:]] == [["slow"]] * 2
        several = names != "x"
        assert [row.values for row in rows[1:]] == ([(3, 4), (5, 6)] if several else [((3, 4),), (5,)])
        assert isinstance(rows[1], ParameterSet) and rows[1].id == ("last" if several else None)
    with pytest.raises(AssertionError, match="inner=2: expected fewer than the 2 rows"):
        parametrize("x", [1, 2], inner=2)
