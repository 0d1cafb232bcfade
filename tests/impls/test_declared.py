"""A field of ``Implementation`` is declared once: its rule, its way to another process and back follow from that."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import normcheck
from normcheck.cases.declared import rules
from normcheck.errors import UsageError
from normcheck.impls.discovery import validated
from normcheck.impls.implementation import Implementation
from normcheck.isolation.select import select_apart

FUNCTIONS = {"forward", "backward", "supports", "unavailable", "model"}
MINE = "from normcheck import Implementation\ndef same(x, weight, bias, *, eps): return x\nIMPLEMENTATIONS = ({},)\n"
ASK = """\
import sys
from normcheck.errors import UsageError
from normcheck.isolation.select import select_apart
for path in sys.argv[1:]:
    try:
        print([i.flavour for i in select_apart(path, (), "cpu", 60.0)])
    except UsageError as error:
        print(error)
"""


def described(**fields: Any) -> Implementation:
    return Implementation(name="mine", op="rmsnorm", forward=lambda x, weight, bias, *, eps: x, **fields)


def test_every_field_that_is_no_function_has_a_rule() -> None:
    assert {f.name for f in fields(Implementation)} == {"name", "op", *FUNCTIONS, *rules(Implementation)}
    validated(described(), "mine.py")  # the defaults keep the rules


@pytest.mark.slow
def test_a_field_that_is_added_by_one_line_arrives_from_the_process_of_its_kernel(tmp_path: Path) -> None:
    shutil.copytree(Path(normcheck.__file__).parent, tmp_path / "normcheck")  # with what is compiled of each file
    file = tmp_path / "normcheck" / "cases" / "declared.py"
    before, last, after = file.read_text(encoding="utf-8").partition("    builds: Annotated[bool, _FLAG] = True\n")
    line = "    flavour: Annotated[tuple[bool, ...], _FLAGS] = (True,)\n"
    file.write_text(before + last + line + after, encoding="utf-8")
    for name, given in {"given": ", flavour=(False, True)", "not": "", "wrong": ", flavour=5"}.items():
        made = f"Implementation(name='mine', op='rmsnorm', forward=same{given})"
        (tmp_path / f"{name}.py").write_text(MINE.format(made), encoding="utf-8")
    asked = [sys.executable, "-c", ASK, "given.py", "not.py", "wrong.py"]
    done = subprocess.run(asked, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "[(False, True)]",
        "[(True,)]",
        "flavour=5 of 'mine' in impl=wrong.py: expected a tuple with False, True or both",
    ], done.stderr


class Saying:
    """In place of a worker: one that has answered with ``found``."""

    def __init__(self, *found: Any) -> None:
        self.found = found

    def receive(self, seconds: float, what: str) -> Any:
        return json.loads(json.dumps({"found": self.found}))

    def kill(self) -> None:
        """It is none."""


TOLD = {
    **{name: getattr(described(), name) for name in rules(Implementation)},
    "name": "mine",
    "op": "rmsnorm",
    "unavailable": "",
    "model": {},
    "backward": False,
    "supports": False,
    "place": ["", 0],
    "backward_place": ["", 0],
}


def read(told: Any) -> Implementation:
    (found,) = select_apart("mine.py", (), "cpu", 1.0, Saying(told))  # type: ignore[arg-type]
    return found


def test_what_a_process_tells_is_read_with_its_types() -> None:
    found = read({**TOLD, "shapes": [[3, 5]], "epsilons": [0], "ranks": [2, 3], "builds": False})
    assert (found.shapes, found.epsilons, found.ranks, found.builds) == (((3, 5),), (0.0,), (2, 3), False)
    assert isinstance(found.epsilons[0], float) if found.epsilons else False


@pytest.mark.parametrize("name", ["op", *rules(Implementation)])
@pytest.mark.parametrize("value", [{"a": 1}, [[[]]], -5, [None]], ids=str)
def test_what_a_process_tells_is_checked(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=r"impl=mine.py"):
        read({**TOLD, name: value})


@pytest.mark.parametrize("name", [*TOLD])
def test_what_a_process_leaves_out_is_missed(name: str) -> None:
    with pytest.raises(UsageError, match="answered nonsense"):
        read({key: value for key, value in TOLD.items() if key != name})


@pytest.mark.parametrize("pattern", ["(", "x" * 201, "a{99999999999999999999}", b"rms", None])
def test_a_kernel_is_expected_by_a_regular_expression(pattern: Any) -> None:
    with pytest.raises(UsageError, match="expected a regular expression of at most 200 characters, or ''"):
        validated(described(expects_kernel=pattern), "mine.py")
    validated(described(expects_kernel="_rms_(fwd|bwd)$"), "mine.py")


def test_what_is_nested_too_deep_is_nonsense() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    saying = Saying()
    saying.receive = lambda seconds, what: {"found": [{**TOLD, "shapes": deep}]}  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="answered nonsense"):
        select_apart("mine.py", (), "cpu", 1.0, saying)  # type: ignore[arg-type]
