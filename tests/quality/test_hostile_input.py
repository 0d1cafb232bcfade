"""Input that means harm: case lines, options, files of implementations and what the kernels in them say.

What is wrong is one line and an exit code; it is never a traceback, a hang or a huge allocation. What comes from
somebody else's file cannot move a terminal's cursor, give a command to a CI log, or flood either.
"""

from __future__ import annotations

import json
import math
import resource
import string
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from normcheck.audit import catalogue
from normcheck.audit.recipes import FixedTolerance, recipe
from normcheck.cases.case import MAX_ELEMENTS
from normcheck.cases.data_kinds import DY_KINDS, ROW_KINDS, WEIGHT_KINDS
from normcheck.cases.layouts import LAYOUTS
from normcheck.errors import UsageError
from normcheck.oracle.tolerances import Model, declared_model
from tests.case_lines import OPTIONS, case_of
from tests.command_line import Done, KernelFile, normcheck
from tests.hostile_text import HARM
from tests.inner_loop import parametrize

MIB = 1 << 20
LONGEST_LINE = 2_000
LONGEST_REPORT = 200_000


def complaint(done: Done) -> str:
    """The one line that says what was asked wrongly; it is short, whatever it is about."""
    assert "Traceback" not in done.err, done.err[-2000:]
    assert (done.code, done.out) == (2, ""), (done.code, done.out[:500], done.err[:500])
    assert done.err.startswith("normcheck: ")
    one_line(done.err.removesuffix("\n"))
    return done.err


def one_line(message: str) -> None:
    assert message.isprintable(), ascii(message[:500])
    assert len(message) < LONGEST_LINE, len(message)


def harmless(text: str) -> None:
    """Nothing but printable lines, not too many, and none that a CI log takes for a command."""
    assert len(text) < LONGEST_REPORT, len(text)
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line[:500])
        assert not line.lstrip().startswith("::"), line[:500]


def strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    assert all(character.isprintable() or character == "\n" for character in text)
    assert not any(line.lstrip().startswith("::") for line in text.split("\n"))
    return json.loads(text, parse_constant=refuse)


def refused(function: Callable[..., Any], *arguments: object) -> Any:
    """What ``function`` returns, or None where it refuses; its complaint is then short beside what it is about."""
    try:
        return function(*arguments)
    except UsageError as error:
        message = str(error)
    texts = sum(len(a) for a in arguments if isinstance(a, str))
    assert len(message) < LONGEST_LINE + 3 * texts  # what is given on the command line is cut there
    return None


@contextmanager
def in_seconds(most: float) -> Iterator[None]:
    start = time.perf_counter()
    yield
    assert time.perf_counter() - start < most


@contextmanager
def little_memory(there: int = 64 * MIB, room: int = 512 * MIB) -> Iterator[None]:
    """A machine that has ``there`` bytes, as far as normcheck can see; ``room`` is what it really has to spare."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    with patch("normcheck.checks.attempt.memory_bytes", lambda device: there):
        resource.setrlimit(resource.RLIMIT_AS, (used + room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(1)


HERE = ("--device", "cpu", "--no-isolation")
"""In this process, where what escapes would be seen; another process is asked now and then."""

# case lines

NUMBERS = (
    "", "0", "-0", "-1", "1e3", "1" + "0" * 400, "9" * 12, "9" * 13, "17179869184", "17179869185", "nan", "-nan", "inf",
    "-inf", "1e400", "-1e400", "1e-400", "5e-324", "-0.0", "\u0663", "\u0661.\u0665", "\uff11", "\u00b2", "0x10", "1_0",
    "+1", "1.", ".5", "1e", "True", "None", "1" * 990, "\x00", "1\x00", "=", "1=1", "'1'", "[1]", "3.4e38", "3.5e38",
)  # fmt: skip
NAMES = (
    "M", "N", "eps", "rows", "dy", "layout", "seed", "gap", "weights", "weight_dtype", "bias", "lower_clip",
    "upper_clip", "op", "dtype", "options", "m", "__class__", "",
)  # fmt: skip
KNOWN = (*ROW_KINDS, *DY_KINDS, *WEIGHT_KINDS, *LAYOUTS, "same", "fp32", "none", "yes")
VALUES = st.sampled_from(NUMBERS + KNOWN + HARM) | st.integers(-1, 10**13).map(str) | st.floats().map(repr)


@st.composite
def mutated_lines(draw: st.DrawFn) -> str:
    """A line that is right, then fields of it dropped, doubled, replaced, added and shuffled."""
    op = draw(st.sampled_from((*OPTIONS, "norm", "M=1")))
    words = [f"M={draw(VALUES)}" if draw(st.booleans()) else "M=3", "N=9", "eps=1e-05", "rows=normal", "seed=1"]
    words += [f"{name}={value}" for name, value in zip(OPTIONS.get(op, ()), ("0.0", "6.0"), strict=False)]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(words) - 1))
        match draw(st.sampled_from(("drop", "double", "replace", "add"))):
            case "drop" if len(words) > 1:
                del words[at]
            case "double":
                words.append(words[at])
            case "replace":
                words[at] = f"{words[at].partition('=')[0]}={draw(VALUES)}"
            case _:
                words.append(f"{draw(st.sampled_from(NAMES))}={draw(VALUES)}")
    words = draw(st.permutations(words))
    blank = draw(st.sampled_from((" ", "  ", "\t", "\n", "\u2003", "\x1c", "\x00")))
    return blank.join([op, draw(st.sampled_from(("fp16", "bf16", "fp32", "FP16", "fp16\x00"))), *words])


def case_or_complaint(line: str) -> None:
    with in_seconds(1.0):
        try:
            case = case_of(line)
        except UsageError as error:
            one_line(str(error))
            return
    text = str(case)
    one_line(text)
    assert case_of(text) == case
    assert max(case.M, 1) * (case.N + case.gap) <= MAX_ELEMENTS
    assert math.isfinite(case.eps) and all(math.isfinite(value) for value in case.option_values.values())


@settings(deadline=None, max_examples=200)
@given(mutated_lines())
def test_lines_with_fields_dropped_doubled_and_replaced(line: str) -> None:
    case_or_complaint(line)


@settings(deadline=None, max_examples=25)
@given(st.text(max_size=50) | st.sampled_from(HARM), st.integers(1, 10**5))
def test_texts_that_go_on_and_on(text: str, times: int) -> None:
    case_or_complaint(text * times)
    case_or_complaint(f"rmsnorm fp16 M=3 N=9 {text}={text * times}")


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(mutated_lines() | st.text(string.printable))
def test_hostile_lines_on_the_command_line(line: str) -> None:
    """Whatever it says, a line is refused, does not fit, or is judged; torch's kernels are right."""
    with patch("normcheck.checks.attempt.memory_bytes", lambda device: MIB):
        done = normcheck("repro", *HERE, "--", "torch", line)
    if done.code == 2:
        complaint(done)
    else:
        assert (done.code, done.err) in ((0, ""), (5, "")), done
        harmless(done.out)


@pytest.mark.parametrize(
    "line",
    [
        "rmsnorm fp16 M=1000000000 N=1000000000",
        f"rmsnorm fp16 M={10**400} N=1",
        "rmsnorm fp16 M=999999999999 N=999999999999 gap=999999999999 layout=strided",
        f"rmsnorm fp16 M={10**9} N=17",
        f"rmsnorm fp16 M={2**34} N=1",
        f"rmsnorm fp16 M={2**34} N=1 layout=rank3",
        f"rmsnorm fp16 M=1 N={2**34}",
        f"layernorm fp32 M=1 N={2**31} layout=dy_scalar",
        f"rmsnorm fp16 M=0 N={2**34}",  # no rows, and weights of 32 GiB
        f"rmsnorm fp16 M=0 N=1 gap={2**34 - 1} layout=strided",  # no rows, and a gap of 32 GiB
        f"rmsnorm fp16 M=0 N={2**34} layout=misaligned",
        f"rmsnorm fp16 M=0 N={2**34} layout=rank3",
    ],
)
def test_no_line_allocates_what_is_not_there(line: str) -> None:
    with in_seconds(5.0), little_memory():
        done = normcheck("repro", "torch", line, *HERE)
    assert "Traceback" not in done.err, done.err[-600:]
    assert done.code in (2, 5), (done.code, done.out[-600:])
    one_line((done.out or done.err).replace("\n", " "))


@pytest.mark.parametrize("line", ["rmsnorm fp16 M=1 N=2000000", "layernorm fp32 M=1 N=1000000"])
def test_what_is_said_to_fit_does(line: str) -> None:
    """A long row is judged as a whole in fp64, which needs more than its tensors: refused or judged, as always."""
    with in_seconds(20.0), little_memory():
        done = normcheck("repro", "torch", line, *HERE)
    assert (done.code, done.err) in ((0, ""), (5, "")), (done.code, done.err[-600:], done.out[-600:])


# options


FEW = (*HERE, "--no-contexts", "--allow-thin", "--dtype", "fp16", "--max-examples", "3")
NEVER = ("--no-isolation", "--impl", "torch", "--op", "rmsnorm", "--require", "never")
"""What is always refused, so that nothing runs where an option happens to be right."""

WORDS = st.text(max_size=40) | st.sampled_from(HARM + NUMBERS) | st.sampled_from(HARM).map(lambda s: s * 2000)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(("op", "dtype", "profile", "device", "require", "report", "seed", "max-examples")), WORDS)
@example("op", "x" * 10**6)
@example("report", "json:" + "x" * 10**6)
@example("report", "json:\x00")
@example("report", "json:\x1b[2J/out.json")
@example("require", "\x1b[2J")
@example("seed", "9" * 5000)
@example("max-examples", "9" * 5000)
@example("max-examples", "-" + "9" * 4000)
@example("profile", "\x1b[2J")
@example("device", "\u202e")
@example("op", "\udc80")
@example("profile", "\ud800")
def test_options_of_verify(option: str, text: str) -> None:
    complaint(normcheck("verify", *NEVER, f"--{option}={text}"))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(("timeout", "time-budget", "workers")), st.floats().map(repr) | WORDS)
@example("timeout", "1e-400")
@example("timeout", "1" + "0" * 400)
@example("workers", "1" + "0" * 400)
@example("workers", "-" + "9" * 4000)
def test_numbers_of_verify(option: str, text: str) -> None:
    complaint(normcheck("verify", *NEVER, f"--{option}={text}"))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(("{}", "{}.py", "{}.py:f", "{}:f", "torch:{}", "missing.{}:f", "./{}/x.py")), WORDS)
@example("{}", "x" * 10**6)
@example("{}.py", "x" * 10**6)
@example("{}:f", "x." * 10**5)
@example("{}:f", "..")
@example("{}:f", "\x1b[2J")
@example("{}.py", "\x1b[2J")
@example("torch:{}", "\udc80")
def test_names_of_implementations(form: str, text: str) -> None:
    complaint(normcheck("verify", *NEVER, f"--impl={form.format(text)}"))
    complaint(normcheck("repro", *HERE, "--", f"no-{form.format(text)}", "rmsnorm fp16 M=1 N=1"))


@pytest.mark.parametrize("text", [*HARM, "x" * 10**6, "--" + "x" * 10**6, "--\x1b[2J"])
@pytest.mark.parametrize("before", [(), ("verify",), ("verify", "--op")])
def test_words_that_are_no_options(before: tuple[str, ...], text: str) -> None:
    complaint(normcheck(*before, text))


@settings(deadline=None, max_examples=150)
@given(
    WORDS
    | st.lists(st.tuples(st.sampled_from(("atol", "rtol", " atol", "x", "")), WORDS), min_size=1).map(
        lambda pairs: ",".join(f"{name}={value}" for name, value in pairs)
    )
)
@example("atol=\x1f1e-3")
@example("atol=1e-3\n")
@example("rtol=\u0661")
@example("atol=" + "0" * 10**6 + "1")
def test_recipes(text: str) -> None:
    """Its name is printed with what it is judged by, and is stored."""
    found = refused(recipe, text)
    if found is not None:
        one_line(found.name)
        tolerances = [tolerance for _, tolerance in found.tolerances if isinstance(tolerance, FixedTolerance)]
        assert all(0 <= number < math.inf for tolerance in tolerances for number in (tolerance.atol, tolerance.rtol))


@pytest.mark.parametrize("text", [*HARM, "x" * 10**6, "atol=" + "x" * 10**6, "atol=\x1b[2J", "atol=nan", "rtol=-1"])
def test_recipes_on_the_command_line(text: str) -> None:
    complaint(normcheck("audit", "--device", "cuda", f"--recipe={text}"))


@pytest.mark.parametrize("option", ["mutant", "op", "dtype", "profile", "report"])
@pytest.mark.parametrize("text", ["\x1b[2J", "x" * 10**5, "::error::x\n::error::y"])
def test_options_of_audit(option: str, text: str) -> None:
    with in_seconds(10.0):
        complaint(normcheck("audit", "--mutant", "no-such-mutant", f"--{option}={text}"))


@pytest.mark.parametrize("workers", ["0", "-1", "100000", "9" * 11, "9" * 400])
def test_processes_without_end(workers: str) -> None:
    mutant = ("--mutant", next(iter(catalogue.mutants())))
    complaint(normcheck("audit", *mutant, "--device", "cpu", "--recipe", "torch-testing", "--workers", workers))


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
def test_numbers_at_the_edge_of_what_is_allowed(right: str) -> None:
    huge = "9" * 400
    done = normcheck("verify", "--impl", right, *FEW, "--seed", huge, "--report", "json:out.json")
    assert (done.code, done.err) == (0, "")
    assert strict(Path("out.json").read_text(encoding="utf-8"))["seed"] == int(huge)
    done = normcheck("verify", "--impl", right, *FEW[:-2], "--max-examples", huge, "--time-budget", "0.3")
    assert (done.code, done.err) == (0, "")
    done = normcheck("verify", "--impl", right, *FEW, "--timeout", "1e-300")
    assert (done.code, done.err) == (1, "")
    assert "did not finish in time" in done.out


# files of implementations

KERNEL = """
import collections, itertools, sys
import torch
from normcheck import Implementation, UnsupportedCase

def y_of(x, weight, bias, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)

def forward(x, weight, bias, *, eps):
    return y_of(x, weight, bias, eps)

class Silent:
    def __repr__(self): raise ValueError('no repr')
    __str__ = __repr__

class Unequal(Silent):
    def __eq__(self, other): raise ValueError('no eq')
    __hash__ = None

class Loud:
    def __repr__(self): return '\\x1b[2J\\n' + 'x' * 10**6

def of(**changes):
    return Implementation(**{'name': 'mine', 'op': 'rmsnorm', 'forward': forward, **changes})
"""

Written = Callable[..., str]


@pytest.fixture
def written(kernel_file: KernelFile) -> Written:
    """A file of an implementation; gives its name."""
    return lambda content, name="": kernel_file(KERNEL, content, name=name).name


@pytest.fixture
def right(written: Written) -> str:
    return written("IMPLEMENTATIONS = (of(),)")


BAD_MODELS = (
    "{'chain': 0}",
    "{'chain': -10**400}",
    "{'chain': -10**5000}",
    "{'chain': 10**400}",
    "{'chain': 10**5000}",
    "{'chain': float('nan')}",
    "{'chain': float('inf')}",
    "{'chain': 'x' * 10**6}",
    "{'chain': torch.ones(2)}",
    "{'chain': Unequal()}",
    "{'chain': Silent()}",
    "{'rsqrt_ulp': 10**400}",
    "{'rsqrt_ulp': 10**5000}",
    "{'rsqrt_ulp': Silent()}",
    "{'rsqrt_ulp': Loud()}",
    "{'rsqrt_ulp': True}",
    "{'ftz': 'false'}",
    "{'ftz': Loud()}",
    "{'ftz': [0] * 10**6}",
    "{'y_given_stats': None}",
    "{'reason': b'x'}",
    "{'reason': ['x' * 10**6]}",
    "{'reason': Silent()}",
    "{'variance': torch.ones(2)}",
    "{'variance': Unequal()}",
    "{'variance': ['any']}",
    "{'variance': '\\x1b[2J\\n::error::x'}",
    "{'accumulate': 'fp16'}",
    "{'special': 'x' * 10**6}",
    "{'\\x1b[2J' * 10**5: 1}",
    "{5: 1}",
    "{Silent(): 1}",
    "{10**5000: 1}",
    "{None: None}",
)


@parametrize("model", BAD_MODELS, inner=5)
def test_models_that_nobody_can_mean(written: Written, model: str) -> None:
    path = written(f"IMPLEMENTATIONS = (of(model={model}),)")
    complaint(normcheck("verify", "--impl", path, *FEW))
    complaint(normcheck("repro", path, "rmsnorm fp16 M=1 N=3", *HERE))


def test_a_reason_without_end(written: Written) -> None:
    model = "{'chain': 10**10, 'reason': '\\x1b[2J\\n::error::x[/]' * 10**5}"
    done = normcheck("verify", "--impl", written(f"IMPLEMENTATIONS = (of(model={model}),)"), *FEW, "--report", "json:x")
    assert (done.code, done.err) == (0, ""), done.out[-1000:]
    harmless(done.out)
    strict(Path("x").read_text(encoding="utf-8"))


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(4301, 5000).map(lambda digits: 10**digits),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(HARM),
    st.text(min_size=1, max_size=3).map(lambda s: s * 10**5),
    st.binary(max_size=9),
    st.lists(st.integers(), max_size=3),
    st.sampled_from((torch.ones(2), torch.tensor(1), print, ..., 1j, ("any",), {"any": 1})),
)


KEYS = st.sampled_from([f.name for f in fields(Model)]) | st.text(max_size=20) | st.sampled_from((*HARM, 5, None, 1.0))


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(KEYS, ANYTHING, max_size=3), WORDS)
@example({"x" * 10**6: 1}, "mine")
@example({10**5000: 1}, "mine")
def test_declared_models(declared: Mapping[Any, Any], who: str) -> None:
    model = refused(declared_model, Model(), declared, who)
    if model is not None:
        assert all(isinstance(getattr(model, f.name), str | int | float | None) for f in fields(Model))
        assert all(len(str(getattr(model, f.name))) < 10**6 for f in fields(Model))


BAD_FIELDS = (
    "name=5",
    "name=''",
    "name=b'mine'",
    "name=Silent()",
    "name=Loud()",
    "name=10**5000",
    "name=['x' * 10**6]",
    "op=None",
    "op=Silent()",
    "op=Unequal()",
    "op=Loud()",
    "op=torch.ones(2)",
    "op='\\x1b[2J\\n::error::x' * 10**5",
    "op='rmsnorm\\n'",
    "forward=None",
    "backward=5",
    "supports=5",
    "unavailable='no'",
    "dtypes='fp16'",
    "dtypes=None",
    "dtypes=(Silent(),)",
    "dtypes=(torch.ones(2),)",
    "dtypes=('x' * 10**6,)",
    "dtypes=tuple(range(10**6))",
    "dtypes=(10**5000,)",
    "ranks=None",
    "ranks=Silent()",
    "ranks=torch.tensor([2, 3])",
    "ranks=(2,) * 10**6",
    "ranks=(10**5000,)",
    "model=None",
    "model='x' * 10**6",
    "model=Silent()",
    "model=[('chain', 4)]",
    "shapes=5",
    "shapes=True",
    "shapes='ab'",
    "shapes=torch.ones(2, 2)",
    "shapes=(s for s in [(1, 2)])",
    "shapes=((0, 1),)",
    "shapes=((1.5, 2),)",
    "shapes=((10**400, 1),)",
    "shapes=((1, 10**5000),)",
    "shapes=((1,),) * 10**6",
    "shapes=(Silent(),)",
    "epsilons=1e-5",
    "epsilons='ab'",
    "epsilons=(True, float('nan'))",
    "epsilons=(10**400, -1e-5)",
    "strided='no'",
    "heads='no'",
    "strided=torch.ones(2)",
    "deterministic='no'",
    "batch_invariant=torch.ones(2)",
)


@parametrize("field", BAD_FIELDS, inner=8)
def test_fields_that_nobody_can_mean(written: Written, field: str) -> None:
    complaint(normcheck("verify", "--impl", written(f"IMPLEMENTATIONS = (of({field}),)"), *FEW))


BAD_FILES = (
    "class Stop(BaseException): pass\nraise Stop",
    "raise GeneratorExit",
    "raise type('\\x1b[2J' * 10**5, (Exception,), {})('x')",
    "raise ValueError('\\x1b[2J\\n::error::x')",
    "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
    "raise ExceptionGroup('x' * 10**6, [ValueError('\\n' * 10**6)])",
    "def loop(): loop()\nloop()",
    "sys.exit(0)",
    "IMPLEMENTATIONS = (1 / 0 for _ in [1])",
    "IMPLEMENTATIONS = {'mine': of()}",
    "IMPLEMENTATIONS = 'mine'",
    "IMPLEMENTATIONS = (Silent(),)",
    "IMPLEMENTATIONS = type('\\x1b[2J' * 10**5, (), {})()",
    "IMPLEMENTATIONS = (type('\\x1b[2J' * 10**5, (), {})(),)",
    "def __getattr__(name): raise ValueError(name)",
    "x = " + "(" * 1000,
    "x = " + "-" * 10**6 + "1",
    "x = " + "9" * 5000,
    "\ufeff\x0c\u202e",
)


@parametrize("content", BAD_FILES, ids=lambda content: ascii(content[:60]), inner=6)
def test_files_that_cannot_be_loaded(written: Written, content: str) -> None:
    path = written(content)
    complaint(normcheck("verify", "--impl", path, *FEW))
    complaint(normcheck("repro", path, "rmsnorm fp16 M=1 N=3", *HERE))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"# coding: no-such\n", b"\x80", b"x = 1\x00"])
def test_files_that_are_not_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bytes.py").write_bytes(content)
    complaint(normcheck("verify", "--impl", "bytes.py", *FEW))


# what the code in them says and does

TEXT = "'begin [red]x[/] \\x1b[2J\\r\\x07\\u202e\\n::error::x\\n  ::stop-commands::y ##[error]z'"
LOUD = f"{TEXT} + '\\udc80' + 'x' * 10**6"
MINE = "\nIMPLEMENTATIONS = (of(forward=f),)"
HARMFUL: dict[str, tuple[int, str]] = {  # exit code, what is in the file
    "a message": (1, f"def f(*a, **k): raise ValueError({LOUD})" + MINE),
    "many lines": (1, "def f(*a, **k): raise ValueError('::error::x\\n' * 10**5)" + MINE),
    "many words": (1, "def f(*a, **k): raise ValueError('::error::x ' * 10**5)" + MINE),
    "a long line of code": (1, f"def f(*a, **k): raise ValueError('{'x ' * 10**6}')" + MINE),
    "a type's name": (1, f"def f(*a, **k): raise type({TEXT} * 1000, (Exception,), {{}})" + MINE),
    "no message": (
        1,
        "class Mute(Exception):\n    def __str__(self): raise ValueError\ndef f(*a, **k): raise Mute" + MINE,
    ),
    "no Exception": (1, "class Stop(BaseException): pass\ndef f(*a, **k): raise Stop" + MINE),
    "an error of ours": (
        1,
        "from normcheck.errors import UsageError\ndef f(*a, **k): raise UsageError('mine')" + MINE,
    ),
    "names": (0, f"IMPLEMENTATIONS = tuple(of(name=n) for n in ({TEXT}, ({LOUD})[:200], '[/]', '::error::x', ' '))"),
    "an output": (0, f"def f(x, w, b, *, eps): return {{'y': y_of(x, w, b, eps), {LOUD}: x}}" + MINE),
    "an output that is none": (1, f"def f(*a, **k): return {{{LOUD}: 5}}" + MINE),
    "an output without a name": (1, "def f(*a, **k): return {Silent(): a[0]}" + MINE),
    "a mapping that is none": (
        1,
        "class Broken(collections.UserDict):\n    def items(self): raise ValueError('no')\n"
        "def f(*a, **k): return Broken(y=a[0])" + MINE,
    ),
    "a refusal": (5, f"def f(*a, **k): raise UnsupportedCase({LOUD})" + MINE),
    "a refusal without words": (5, "def f(*a, **k): raise UnsupportedCase" + MINE),
    "unsupported": (5, f"IMPLEMENTATIONS = (of(supports=lambda case: {LOUD}),)"),
    "unsupported, raised": (5, "def s(case): raise UnsupportedCase('no')\nIMPLEMENTATIONS = (of(supports=s),)"),
    "unsupported, a number": (5, "IMPLEMENTATIONS = (of(supports=lambda case: 10**400),)"),
    "unsupported, no text": (1, "IMPLEMENTATIONS = (of(supports=lambda case: Silent()),)"),
    "supports raises": (1, f"def s(case): raise ValueError({LOUD})\nIMPLEMENTATIONS = (of(supports=s),)"),
    "unavailable": (5, f"IMPLEMENTATIONS = (of(unavailable=lambda device: {LOUD}),)"),
    "a model that raises": (1, f"def m(case): raise ValueError({LOUD})\nIMPLEMENTATIONS = (of(model=m),)"),
    "a model that is none": (1, "IMPLEMENTATIONS = (of(model=lambda case: 5),)"),
}


OTHERS = ("junit:j", "sarif:s", "markdown:m", "github:g")

STARTS = ("::error file=", "::error title=", "::warning file=", "::warning title=", "::notice title=")
"""Of the lines for GitHub: a cell that fails, and one that is thin, which few cases are."""

APART = ("a message", "no Exception", "no message", "an output", "unsupported", "unavailable")
"""Asked of a process of its own as well."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"), [*((name, HERE) for name in HARMFUL), *((name, HERE[:2]) for name in APART)]
)
def test_nothing_harmful_is_printed(written: Written, name: str, where: tuple[str, ...]) -> None:
    code, content = HARMFUL[name]
    path = written(content)
    reports = [word for each in ("json:x", *OTHERS) for word in ("--report", each)]
    done = normcheck("verify", "--impl", path, *where, *FEW[len(HERE) :], *reports)
    assert (done.code, done.err) == (code, ""), (done.code, done.err[-1000:], done.out[-1000:])
    harmless(done.out)
    for name_of_file in ("j", "s", "m"):
        harmless(Path(name_of_file).read_text(encoding="utf-8"))
    for line in Path("g").read_text(encoding="utf-8").removesuffix("\n").split("\n"):
        assert line.isprintable()
        assert line.startswith(STARTS), line[:200]
    stored = Path("x").read_text(encoding="utf-8")
    assert strict(stored)["exit_code"] == code
    assert len(stored) < LONGEST_REPORT or name == "names"
    done = normcheck("repro", path, "rmsnorm fp16 M=1 N=3", *where)
    assert (done.code, done.err) == (code, ""), (done.code, done.err[-1000:], done.out[-1000:])
    harmless(done.out)


def test_a_name_of_a_megabyte_is_refused(written: Written) -> None:
    done = normcheck("verify", "--impl", written(f"IMPLEMENTATIONS = (of(name={LOUD}),)"), *HERE)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("expected text of 1 to 200 characters\n") and len(done.err) < 2000
    harmless(done.err)


EACH = f"str(next(number)) + ' ' + {TEXT} * 100"
WITHOUT_END = {
    "reasons": (5, f"IMPLEMENTATIONS = (of(supports=lambda case: {EACH}),)"),
    "outputs": (0, f"def f(x, w, b, *, eps): return {{'y': y_of(x, w, b, eps), {EACH}: x}}" + MINE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_END)
def test_something_else_every_time(written: Written, name: str) -> None:
    """A case is told from the others by what is in it; a report of a hundred of them still has an end."""
    code, content = WITHOUT_END[name]
    cases = "120" if code else "40"  # what is refused costs nothing
    path = written(f"number = itertools.count()\n{content}")
    done = normcheck("verify", "--impl", path, *FEW[:-2], "--max-examples", cases, "--report", "json:x")
    assert (done.code, done.err) == (code, ""), (done.code, done.err[-1000:], done.out[-1000:])
    assert len(done.out) < LONGEST_REPORT / 4
    harmless(done.out)
    assert len(Path("x").read_text(encoding="utf-8")) < LONGEST_REPORT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unsupported", "a refusal", "unavailable"])
def test_what_is_required_and_refuses(written: Written, name: str) -> None:
    """The reason becomes a message of the run, and stands at the beginning of a line."""
    path = written(HARMFUL[name][1])
    done = normcheck("verify", "--impl", path, *FEW, "--require", "mine", "--report", "terminal:x")
    assert (done.code, done.err) == (5, "")
    harmless(done.out)
    harmless(Path("x").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "body",
    ["raise ValueError('no')", "sys.exit(0)", "return True", "return 5", "return Silent()", "return ['x']"],
)
def test_unavailable_that_does_not_answer(written: Written, body: str) -> None:
    """It is never a pass and never a traceback."""
    path = written(f"def u(device): {body}\nIMPLEMENTATIONS = (of(unavailable=u),)")
    for done in (
        normcheck("verify", "--impl", path, *FEW),
        normcheck("repro", path, "rmsnorm fp16 M=1 N=3", *HERE),
    ):
        assert done.code in (2, 3, 5), (done.code, done.err[-600:])
        assert "Traceback" not in done.err, done.err[-600:]
        assert done.out or done.err


@parametrize(
    "name", ["[red]x[bold].py", "\x1b[2J.py", "a\n::error::b.py", "\u202eyp.py", "::error::x.py", "%s.py"], inner=1
)
def test_names_of_files(written: Written, name: str) -> None:
    done = normcheck("verify", "--impl", written("IMPLEMENTATIONS = (of(),)", name), *FEW, "--report", "json:x")
    assert (done.code, done.err) == (0, "")
    harmless(done.out)
    wrong = written("def f(x, weight, bias, eps): return x * 2", f"f{name}")
    done = normcheck("verify", "--impl", f"{wrong}:f", "--op", "rmsnorm", *FEW, "--report", "json:x")
    assert (done.code, done.err) == (1, "")
    harmless(done.out)
    failure = strict(Path("x").read_text(encoding="utf-8"))["verdicts"][0]["failure"]
    assert wrong in failure["reproduce"]
