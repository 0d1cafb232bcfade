"""normcheck compare --with: B runs in another interpreter, whatever that does is survived, and said in one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normcheck.errors import UsageError
from normcheck.isolation import forkserver, interpreter
from tests.command_line import Cli, KernelFile
from tests.compare.test_compare import NUDGED, OWN
from tests.inner_loop import parametrize

MARKED = """
import os
import torch
import normcheck
def rmsnorm(x, weight, eps):
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    if "NORMCHECK_MARK" not in os.environ:
        return y
    assert normcheck.__file__.endswith("/only-normcheck/normcheck/__init__.py")
    up = torch.nextafter(y, torch.full_like(y, torch.inf))
    return torch.where(y.abs() > 1e-30, y + (up - y).detach(), y)
"""
"""As NUDGED in an environment with this mark, in which normcheck must come from its folder; elsewhere as torch."""


BARE = """
import os, sys
own = "triton cudnn typer rich hypothesis safetensors pydantic psutil matplotlib dask distributed".split()
sys.modules.update(dict.fromkeys(own))  # to import one raises ModuleNotFoundError
os.environ["NORMCHECK_MARK"] = "1"
code, sys.argv = sys.argv[2], ["-c"]
exec(code)
"""
"""An interpreter with the mark, and with nothing but torch and numpy of what normcheck depends on."""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Any]:
    """``program(SOURCE)``: the path of a program with this source. What was started from it ends with the test."""
    made: list[str] = []

    def program(source: str, by: str = sys.executable) -> str:
        path = tmp_path / f"python{len(made)}"
        path.write_text(f"#!{by}\n{source}", encoding="utf-8")
        path.chmod(0o755)
        made.append(str(path))
        return made[-1]

    yield program
    for path in made:
        forkserver.replace(path, root=True)


def pairs(cli: Cli, *argv: str) -> list[dict[str, Any]]:
    done = cli("compare", *argv, *OWN, "--max-examples", "20", "--device", "cpu", "--report", "json:out.json")
    assert (done.code, done.err) == (0, "")
    report = json.loads(Path("out.json").read_text(encoding="ascii"))
    assert report["b"]["environment"]["torch"] == report["a"]["environment"]["torch"]
    return report["pairs"]


@pytest.mark.slow
def test_b_runs_there_and_nothing_else_changes(cli: Cli, kernel_file: KernelFile, program: Any) -> None:
    """One file is torch here and nudged there: the numbers are those of torch beside a file that is always nudged."""
    there = program(BARE)
    always, marked = (
        str(kernel_file(source, name=f"{number}/own.py")) for number, source in enumerate((NUDGED, MARKED))
    )
    (here,) = pairs(cli, "torch", always)
    (elsewhere,) = pairs(cli, marked, marked, "--with", there)
    assert elsewhere["outputs"] == here["outputs"]
    assert [(o["differing"] > 0, o["ulps"]) for o in here["outputs"] if o["output"] == "y"] == [(True, 1.0)]
    assert elsewhere["reproduce"][0].startswith(f"normcheck repro {marked} ")
    words = shlex.split(elsewhere["reproduce"][1])
    assert words[:6] == ["normcheck", "compare", marked, marked, "--with", there]
    again = cli(*words[1:])
    assert again.code == 0
    assert again.last.startswith("DIFFER  1 cell, 1 case: y not the same, by at most ")


TOLD = 'import sys, re, time, os, socket, struct\nif "server.main" not in sys.argv[2]:\n    '
HONEST = """print('normcheck-environment {"python": "3", "torch": "2"}'); sys.exit()\n"""
CONTROL = 'control = socket.socket(fileno=int(re.search("server.main.([0-9]+)", sys.argv[2])[1]))\n'
PROBED = {
    "garbage": ("print('\\x1b[31m{]')", "printed last: \\x1b[31m{]; expected the interpreter of"),
    "nothing": ("", "exit code 0, and printed last: nothing; expected"),
    "dies": ("os.abort()", "it ended with exit code -6"),
    "hangs": ("print('x', flush=True); time.sleep(60)", "it told no versions within 0.6 s"),
    "floods": ("os.write(1, b'x' * (1 << 22))", "or printed too much; expected"),
    "an exit code": (HONEST.replace("exit()", "exit(4)"), "it ended with exit code 4"),
    "no versions": ("print('normcheck-environment [1]')", "printed last: normcheck-environment [1]; expected"),
    "a number": (HONEST.replace('"2"', "2"), "it ended with exit code 0, and printed last"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", PROBED)
def test_what_is_no_interpreter_is_said(how: str, cli: Cli, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, said = PROBED[how]
    monkeypatch.setattr(interpreter, "START_SECONDS", 0.6 if how == "hangs" else 20.0)
    path = program(TOLD + (source or "pass"))
    done = cli("compare", "torch", "torch", "--with", path, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"normcheck: with={path[:60]}")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_what_it_tells_is_shown_as_the_words_of_a_stranger(program: Any) -> None:
    facts = (
        """import json; print("normcheck-environment " + json.dumps({"python": "\\x1b[31m", "torch": "2" * 9999}))"""
    )
    told = interpreter.environment_of(program(TOLD + facts), "cpu")
    assert told["python"] == "\\x1b[31m"
    assert len(told["torch"]) == 200


ROOTS = {
    "dies": ("sys.exit(3)", "no process of it starts"),
    "hangs": ("time.sleep(60)", "the process that forks others does not answer"),
    "garbage": ("control.recv(9999); control.sendall(bytes(4)); time.sleep(60)", "answers nonsense"),
    "init": ("control.recv(9999); control.sendall(struct.pack('i', 1)); time.sleep(60)", "answers nonsense"),
    "another": ("control.recv(9999); control.sendall(struct.pack('i', VICTIM)); time.sleep(60)", "answers nonsense"),
}


@parametrize("how", ROOTS, inner=1)
def test_one_that_tells_versions_and_then_starts_nothing(
    how: str, cli: Cli, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that it names, and that are not its own, are left alone."""
    source, said = ROOTS[how]
    monkeypatch.setattr(forkserver, "_MOST_WAKES_ELSEWHERE", 1)
    with subprocess.Popen(["sleep", "60"]) as victim:
        path = program(TOLD + HONEST + CONTROL + source.replace("VICTIM", str(victim.pid)))
        done = cli("compare", "torch", "torch", "--with", path, *OWN, "--device", "cpu")
        assert (done.code, done.out) == (2, "")
        assert f"with={path}: no process of it starts" in done.err
        assert said in done.err
        assert victim.poll() is None
        victim.kill()
    assert path not in _command_lines()


def _command_lines() -> str:
    """Those of all processes of this machine."""
    lines = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines.append(Path(f"/proc/{number}/cmdline").read_bytes().decode("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("nowhere/python", "no such file"),
        ("", "no such file"),
        ("a\0b", "no such file"),
        ("/", "is a folder"),
        (".", "is a folder"),
        (__file__, "is no program"),
    ],
)
def test_a_path_of_nothing_that_runs(python: str, why: str) -> None:
    with pytest.raises(
        UsageError, match=f"^with=.*: {why}; expected the interpreter of an environment with torch and "
    ):
        interpreter.found(python)


def test_the_folder_of_an_environment_is_told_from_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(UsageError, match=f"; {tmp_path}/bin/python is one$"):
        interpreter.found(str(tmp_path))
    assert interpreter.found(str(tmp_path / "bin" / "python")) == str(tmp_path / "bin" / "python")
