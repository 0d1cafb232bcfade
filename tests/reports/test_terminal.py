"""The terminal report: expected text, and what no foreign string may do to it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from normcheck.reports import _picture, _text, terminal
from normcheck.reports._cells import Screen
from normcheck.result import (
    KINDS,
    CellKey,
    Explanation,
    Finding,
    Larger,
    Steadiness,
    SweepResult,
    Term,
    Vacuity,
    Verdict,
    Where,
)
from tests.sample_runs import (
    CASE,
    HOSTILE,
    RUNS,
    exception,
    failed,
    failing,
    finding,
    hostile,
    passing,
    run,
    skipped,
    verdict,
    where,
)
from tests.some import some

GOLDEN = Path(__file__).parents[2] / "golden" / "reports"

ROWS: tuple[terminal.Row, ...] = (
    ("y", "end to end", 0.812, 2.4e-4, 0.5, 0),
    ("y", "given the kernel's own statistics", 0.9997, 1.1e-4, 0.5, 3),
    ("rstd", "end to end", 0.0123, 3.1e-8, 1.0, 0),
    ("dx", "given the reference's statistics", 3.05, 6.1e-4, 12.4, 0),
    ("dw", "end to end", math.nan, math.inf, 70_000.0, 0),
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich reads these; a test must not depend on where it runs."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def written(a_run: SweepResult, *, width: int = 80, stream: io.StringIO | None = None) -> str:
    stream = io.StringIO() if stream is None else stream
    terminal.render(a_run, _text.console_for(stream, width=width))
    return stream.getvalue()


def written_case(rows: tuple[terminal.Row, ...], findings: tuple[Finding, ...], **changes: object) -> str:
    stream = io.StringIO()
    options = {"case": CASE, "implementation": "mine.py", **changes}
    terminal.render_case(_text.console_for(stream, width=80), rows=rows, findings=findings, **options)  # type: ignore[arg-type]
    return stream.getvalue()


@pytest.mark.parametrize("name", RUNS)
def test_whole_report(name: str, recorded: Callable[[str, str], None]) -> None:
    recorded(f"reports/terminal_{name}.txt", written(RUNS[name]()))
    recorded(f"reports/terminal_{name}_120.txt", written(RUNS[name](), width=120))


@pytest.mark.parametrize(
    ("name", "rows", "findings"),
    [
        ("case_pass", ROWS[:3], ()),
        ("case_fail", ROWS, (finding(also=("dw",)), finding(output="dw", where=None, advice="", terms=()))),
        ("case_exception", (), (exception(),)),
        ("case_nothing", (), ()),
    ],
)
def test_case_report(
    name: str, rows: tuple[terminal.Row, ...], findings: tuple[Finding, ...], recorded: Callable[[str, str], None]
) -> None:
    recorded(f"reports/terminal_{name}.txt", written_case(rows, findings, not_returned=("mean",)))


def test_no_golden_file_is_left_over() -> None:
    cases = {"case_pass", "case_fail", "case_exception", "case_nothing"}
    wide = {f"{name}_120" for name in RUNS}
    assert {path.stem for path in GOLDEN.glob("terminal_*")} == {f"terminal_{name}" for name in (*RUNS, *wide, *cases)}


def test_write_is_the_report_of_the_module() -> None:
    stream = io.StringIO()
    terminal.REPORT.write(passing(), stream)
    assert terminal.REPORT.name == "terminal"
    assert stream.getvalue() == written(passing())


@pytest.mark.parametrize("make", [passing, failing, hostile], ids=["pass", "fail", "hostile"])
def test_no_escape_codes_in_a_pipe(make: Callable[[], SweepResult]) -> None:
    text = written(make())
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("make", [passing, failing, hostile], ids=["pass", "fail", "hostile"])
def test_no_escape_codes_with_no_color_on_a_terminal(
    make: Callable[[], SweepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(make(), stream=Terminal()) == written(make())


def test_colour_on_a_terminal() -> None:
    text = written(failing(), stream=Terminal())
    assert "\x1b[1;31mFAIL" in text
    assert "\x1b[32mpass" in text


def test_only_our_own_escape_codes_on_a_terminal() -> None:
    """A foreign escape is shown as text, so removing Rich's colours leaves what a pipe gets."""
    text = written(hostile(), stream=Terminal())
    plain = "".join(part.partition("m")[2] if i else part for i, part in enumerate(text.split("\x1b[")))
    assert plain == written(hostile())


def test_foreign_strings_are_shown_literally() -> None:
    text = written(run(verdict(implementation=HOSTILE), skipped(detail=HOSTILE)), width=200)
    assert r"[red]x[/] \x1b[31mred\x1b[0m \x07\u202egnp.exe [link=https://example.org]y[/link] :boom: \[b]" in text


def test_huge_message_is_cut() -> None:
    message = "begin" + "x" * 1_000_000 + "ptxas error: the end"
    text = written(run(failed(exception(message=message)), status="fail"))
    assert len(text) < 8_000
    assert "begin" in text
    assert "the end" in text
    assert "998,025 characters cut" in text


def test_many_lines_are_cut() -> None:
    text = written(run(failed(exception(message="a\n" * 900)), status="fail"))
    assert text.count("\n") < 60
    assert "lines cut" in text


@pytest.mark.parametrize("name", [*RUNS, "hostile"])
def test_width(name: str) -> None:
    for width in (80, 81, 100, 120, 200):
        lines = written({**RUNS, "hostile": hostile}[name](), width=width).rstrip("\n").split("\n")
        pasteable = ("Explain: ", "Reproduce: ", "  Case: ")
        long = [line for line in lines[:-1] if cell_len(line) > width and not line.startswith(pasteable)]
        assert long == [], width


@pytest.mark.parametrize("width", [80, 200])
def test_ordinary_cells_take_one_line(width: int) -> None:
    """The two longest names of an op take a second one at 80, with the worst ratio in it."""
    ops = ("layernorm", "rmsnorm_llama")
    lines = written(run(*[verdict(op=op, shapes=112) for op in ops]), width=width).split("\n")
    assert [line.endswith(" 200 cases, 112 shapes  2.1 s  worst 0.999 y") for line in lines[:2]] == [True, True]
    long = ("layernorm_zero_centered", "layernorm_relu_bitmask")
    lines = written(run(*[verdict(op=op) for op in long]), width=width).split("\n")
    assert [line.strip().endswith("worst 0.999 y") for line in lines[:4]] == (
        [False, True, False, True] if width == 80 else [True, True, False, False]
    )


def test_the_last_line_says_what_the_run_stands_on() -> None:
    def last(*cells: Verdict, **changes: object) -> str:
        return written(run(*cells, **changes)).rstrip("\n").split("\n")[-1]

    few = verdict(cases=61, shapes=4, implementation="torch_compile")
    least = "461 cases in 12.3 s; least 61 cases on 4 shapes (rmsnorm torch_compile bf16), median 200; worst ratio "
    assert least in last(verdict(), few, verdict(dtype="fp16"), skipped())
    assert "; least 61 cases on 4 shapes (" in last(verdict(), few, status="nothing", exit_code=5)
    assert "least" not in last(verdict(), few, failed(finding()), status="fail", exit_code=1)
    assert ", 61 cases on 4 shapes in 12.3 s; worst" in last(few, skipped())
    assert ", 61 cases in 12.3 s; worst" in last(replace(few, shapes=None))
    assert "; least 61 cases (rmsnorm torch" in last(verdict(), replace(few, shapes=None))
    assert "; least 61 cases on 1 shape (" in last(verdict(cases=61), replace(few, shapes=1))


def test_a_report_that_did_not_count_shapes_shows_none() -> None:
    text = written(run(verdict(shapes=None)))
    assert " 200 cases  2.1 s" in text
    assert "shape" not in text


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_reproduce_is_never_broken(stream: type[io.StringIO]) -> None:
    command = "normcheck repro 'a [bold]file[/].py' '" + "word " * 100 + "'"
    text = written(run(failed(finding(reproduce=command)), status="fail"), stream=stream())
    assert f"{command}\n" in text.replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_reproduce_ends_its_block() -> None:
    text = written(failing())
    for block in some(text.split("\nFAIL ")[1:3]):
        if "Case:" in block:
            assert block.split("\n\n")[0].split("\n")[-1].startswith("Reproduce: normcheck repro mine.py ")


def test_last_line_is_one_line() -> None:
    many = [failed(finding(), op=f"op{i}") for i in range(20)]
    last = written(run(*many, status="fail", exit_code=1)).rstrip("\n").split("\n")[-1]
    assert last.startswith("FAIL  20 of 20 cells failed: op0/mine.py fp16 (dx), ")
    assert "and 17 more" in last


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("pass", "PASS  3 cells passed, 0 failed, 3 skipped"),
        ("fail", "FAIL  2 of 3 cells failed: rmsnorm/mine.py fp16 (dx)"),
        ("nothing", "NOTHING CHECKED  2 cells skipped (cudnn: no CUDA device)"),
        ("required", "NOT CHECKED  required=cudnn did not run"),
        ("error", "ERROR  1 of 2 cells could not be judged: rmsnorm/triton fp32"),
        ("incomplete", "INCOMPLETE  stopped before the end; so far 1 cell passed"),
        ("incomplete_fail", "FAIL (incomplete)  1 of 2 cells failed"),
        ("known", "PASS  1 cell passed, 1 failed as known"),
    ],
)
def test_last_line_says_the_status_first(name: str, start: str) -> None:
    assert written(RUNS[name]()).rstrip("\n").split("\n")[-1].startswith(start)


def test_no_cells_at_all() -> None:
    assert written(run(status="nothing", exit_code=5)).rstrip().split("\n")[-1].startswith("NOTHING CHECKED  no cell")
    stopped = written(run(status="nothing", exit_code=130, complete=False)).rstrip().split("\n")[-1]
    assert stopped.startswith("INCOMPLETE  stopped before the first cell was finished, 0 cases")


@pytest.mark.parametrize("kind", [*KINDS, "a_new_kind"])
def test_a_finding_of_which_nothing_is_known(kind: str) -> None:
    text = written(run(failed(Finding(kind=kind, output="", case="", message="", reproduce="")), status="fail"))
    assert "FAIL rmsnorm mine.py fp16: " in text
    assert "None" not in text


def test_failed_cell_without_a_finding() -> None:
    assert "why it failed" in written(run(verdict(status="fail", detail="why it failed"), status="fail"))


def test_ascii_stream() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    terminal.render(run(failed(finding(advice="größer")), status="fail"), Console(file=stream, width=80))
    text = raw.getvalue().decode("ascii")
    assert r"gr\xf6\xdfer" in text
    assert "...+\n" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1.0, 0.004), "store 1 (100%)"),
        ((1.0, 0.006), "store 1 (99%) + rstd 0.006 (1%)"),
        ((1.0, 0.0), "store 1 (100%)"),
        ((0.99, 0.004, 0.003, 0.002, 0.001), "store 0.99 (99%)"),
        ((1.0, 0.1, 0.1, 0.1, 0.001, 0.001), "store 1 (77%) + rstd 0.1 (8%) + ops 0.1 (8%) + c1 0.1 (8%)"),
        (
            (1.0, 0.1, 0.1, 0.1, 0.01, 0.01),
            "store 1 (76%) + rstd 0.1 (8%) + ops 0.1 (8%) + c1 0.1 (8%) + 2 more 0.02 (2%)",
        ),
    ],
)
def test_a_share_of_nothing_is_left_out(values: tuple[float, ...], words: str) -> None:
    names = ("store", "rstd", "ops", "c1", "c2", "underflow")
    terms = tuple(Term(name=name, value=value) for name, value in zip(names, values, strict=False))
    text = written(run(failed(finding(terms=terms)), status="fail"), width=200)
    assert f"bound     2.0e-04 = {words}\n" in text


def in_dtypes(*findings: Finding) -> list[Verdict]:
    """A cell of fp16, bf16 and so on, each with its finding, whose lines are of its dtype."""
    cells = []
    for dtype, found in zip(("fp16", "bf16", "fp32"), findings, strict=False):
        case, reproduce = (text.replace(" fp16 ", f" {dtype} ") for text in (found.case, found.reproduce))
        cells.append(failed(replace(found, case=case, reproduce=reproduce), dtype=dtype))
    return cells


EPS = Explanation(name="eps_outside", words="eps is outside the root", cases=7, elements=28508, others=150)


def test_one_finding_in_three_dtypes_is_told_once_with_what_differs() -> None:
    """The same place in the same case: the ratios differ."""
    same = in_dtypes(finding(), finding(ratio=12.0, actual=1.5), finding(ratio=math.inf, max_ulp=3.0))
    text = written(run(*same, status="fail"))
    assert text.count("\nReproduce: ") == 1
    assert "\nFAIL rmsnorm mine.py fp16, bf16, fp32: dx is wrong (given the " in text
    assert "\n  Also in bf16: 12 times what is allowed\n  Also in fp32: wrong beyond any bound\n  Case: " in text
    each = io.StringIO()
    terminal.render(run(*same, status="fail"), terminal.console_for(each), cells=False, verbosity=1)
    assert each.getvalue().count("\nReproduce: ") == 3


def test_one_known_fault_in_two_dtypes_is_told_once_with_both_lines_to_paste() -> None:
    """Shrunk to different cases, where different elements are wrong."""
    other = finding(
        explanation=replace(EPS, elements=9), where=None, also=("dw",), case="rmsnorm fp16 M=1", reproduce="run this"
    )
    text = written(run(*in_dtypes(finding(explanation=EPS), other), status="fail"))
    assert (text.count("Might be: "), text.count("Reproduce: ")) == (1, 1)
    assert "\n  Also in bf16: 3.05 times what is allowed; run this\n" in text


@pytest.mark.parametrize(
    "other",
    [
        finding(where=None),
        finding(case="rmsnorm fp16 M=1"),
        finding(check="end to end"),
        finding(output="dw"),
        finding(explanation=EPS),
        finding(advice="another"),
        finding(cause="another"),
        exception(),
    ],
)
def test_two_findings_are_told_apart(other: Finding) -> None:
    for findings in ((finding(), other), (other, finding())):
        assert written(run(*in_dtypes(*findings), status="fail")).count("\nReproduce: ") == 2
    told = (exception(), exception(message="RuntimeError: another limit"))
    assert written(run(*in_dtypes(*told), status="fail")).count("\nReproduce: ") == 2


def test_a_larger_case_is_drawn_with_its_line() -> None:
    larger = Larger(case="rmsnorm fp16 M=3 N=129", where=where())
    text = written(run(failed(finding(larger=larger)), status="fail"))
    assert "\n  Larger case, 3 x 129: only column 128 of 129, row 2\n    row\\col 0 " in text
    assert "\n    Case: rmsnorm fp16 M=3 N=129\n  Advice: " in text


def test_nothing_is_drawn_of_a_larger_case_that_is_all_wrong() -> None:
    every = Larger(case="rmsnorm", where=Where(rows=1, columns=4000, grid=((1.0,) * 48,), summary="every element"))
    text = written(run(failed(finding(larger=every)), status="fail"))
    assert "\n  Larger case, 4,000: every element\n  Advice: " in text


def picture_text(where: Where, *, blocks: bool = True) -> str:
    lines = _picture.picture(where, blocks=blocks)
    return "\n".join("".join(part if isinstance(part, str) else part[0] for part in line) for line in lines)


def test_picture_shades() -> None:
    where = Where(rows=16, columns=6, grid=((0.0, 0.01, 0.3, 0.6, 1.0, math.nan), (0.0,) * 6), summary="")
    assert picture_text(where).split("\n") == [
        "row\\col 0    5",
        "    0-7 .░▒▓█?",
        "   8-15 ......",
        "        . right  ░ up to 25% wrong  ▒ up to 50%  ▓ more  █ all",
    ]
    assert ".:+*#?" in picture_text(where, blocks=False)


@pytest.mark.parametrize(("cells", "columns", "expected"), [(1, 1, "0"), (1, 9, "0-8"), (2, 2, "0-1"), (3, 3, "0 2")])
def test_ruler_of_a_small_picture(cells: int, columns: int, expected: str) -> None:
    assert _picture.ruler(cells, columns) == expected


@pytest.mark.parametrize(("cells", "size"), [(8, 9), (8, 129), (48, 1000), (3, 3), (1, 7)])
def test_labels_name_the_elements_of_their_cell(cells: int, size: int) -> None:
    firsts = [min(i for i in range(size) if i * cells // size == cell) for cell in range(cells)]
    assert [_picture.first_of(cell, cells, size) for cell in range(cells)] == firsts


def test_picture_of_a_vector() -> None:
    assert (
        picture_text(Where(rows=1, columns=4, grid=((0.0, 1.0, 0.0, 0.0),), summary="")) == "column 0  3\n       .█.."
    )


def test_picture_of_nothing() -> None:
    assert picture_text(Where(rows=0, columns=0, grid=(), summary="")) == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0.0, "0"), (-0.0, "0"), (0.999, "0.999"), (1.3e-4, "1.3e-04"), (999.6, "1.0e+03"), (12.44, "12.4")],
)
def test_compact(value: float | None, expected: str) -> None:
    assert _text.compact(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.99996, "0.999"), (1.0, "1"), (1.0000001, "1.001"), (3.05, "3.05"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_ratio_is_not_rounded_across_one(value: float, expected: str) -> None:
    assert _text.ratio(value) == expected


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [(0, 9, "0%"), (9, 9, "100%"), (1, 10**6, "<0.1%"), (10**6 - 1, 10**6, ">99.9%"), (3, 387, "0.8%"), (0, 0, "-")],
)
def test_percent_tells_none_from_few(part: int, whole: int, expected: str) -> None:
    assert _text.percent(part, whole) == expected


def updated(screen: Screen) -> None:
    screen.update(0, CellKey("rmsnorm", "[red]mine[/]\x1b.py", "fp16"), 17, 0.5)
    screen.verdict(verdict())


def test_live_in_a_pipe_prints_the_cells_only() -> None:
    stream = io.StringIO()
    with terminal.live(_text.console_for(stream, width=80), 2) as screen:
        updated(screen)
        assert stream.getvalue() == "pass  rmsnorm      triton      bf16   200 cases, 38 shapes  2.1 s  worst 0.999 y\n"


def test_live_on_a_terminal_shows_progress_and_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("normcheck.reports._cells.time.monotonic", lambda: 0.0)
    with terminal.live(_text.console_for(stream, width=80), 2, cells=[CellKey("rmsnorm", "triton", "bf16")]) as screen:
        updated(screen)
        drawn = r"[1/2] 0.00 s  0 findings, 2 cells left; rmsnorm [red]mine[/]\x1b.py fp16  17 cases, worst 0.5"
        assert drawn[:80] in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")
    assert "rmsnorm triton bf16   200 cases, 38 shapes" in stream.getvalue()


def test_progress_counts_findings_cases_and_cells_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = Terminal(), iter(range(0, 1000, 2))
    wrong = next(v.failure for v in failing().verdicts if v.failure)
    monkeypatch.setattr("normcheck.reports._cells.time.monotonic", lambda: float(next(clock)))
    with terminal.live(_text.console_for(stream, width=120), 3) as screen:
        screen.verdict(replace(verdict(), failure=wrong, status="fail"))
        assert "[0/3] 2.0 s  0 findings, 3 cells left" in stream.getvalue()
        assert "[1/3] 4.0 s  1 finding, 2 cells left, 50 cases/s" in stream.getvalue()
        screen.update(1, CellKey("rmsnorm", "mine", "fp16"), 40, 0.5)
        drawn = "[2/3] 6.0 s  1 finding, 2 cells left, 40 cases/s; rmsnorm mine fp16  40 cases, worst 0.5"
        assert drawn in stream.getvalue()


def test_a_narrow_terminal_cuts_off_what_matters_least() -> None:
    stream = Terminal()
    with terminal.live(_text.console_for(stream, width=48), 12) as screen:
        screen.update(0, CellKey("layernorm_relu_bitmask", "torch_compile", "bf16"), 1234, 0.5)
    assert re.search(r"\[1/12\] 0\.\d\d s  0 findings, 12 cells left; layern", stream.getvalue())
    assert "layerno" not in stream.getvalue()


def test_quiet_says_what_failed_and_the_last_line() -> None:
    stream = io.StringIO()
    with terminal.live(_text.console_for(stream, width=80), 2, verbosity=-1) as screen:
        updated(screen)
    assert stream.getvalue() == ""
    with terminal.live(_text.console_for(Terminal(), width=80), 2, verbosity=-1) as screen:
        updated(screen)
        assert screen._line is None
    terminal.render(failing(), _text.console_for(stream, width=80), verbosity=-1)
    quiet, whole = stream.getvalue(), written(failing())
    assert quiet.splitlines()[-1] == whole.splitlines()[-1]
    assert "\nReproduce: " in quiet
    assert "pass  rmsnorm" not in quiet
    assert "Not run" not in quiet
    assert "profile, seed" not in quiet


def test_verbose_shows_what_was_measured() -> None:
    measured = replace(
        verdict(),
        repeats={"y": Steadiness(differ=0, cases=40)},
        invariance={"y": Steadiness(differ=3, cases=12)},
        vacuity={"y": Vacuity(zeros=1, total=50, empty=0, checks=9)},
    )
    skipped = replace(verdict(), status="skip", detail="all refused", skipped={"only on Sundays": 7}, failure=None)
    run = replace(failing(), verdicts=(measured, skipped))
    plain, verbose = io.StringIO(), io.StringIO()
    terminal.render(run, _text.console_for(plain, width=200))
    terminal.render(run, _text.console_for(verbose, width=200), verbosity=1)
    (line,) = (line for line in verbose.getvalue().splitlines() if "zeros would pass" in line)
    said = "y: zeros would pass 2.0%, other bits when run again in 0 of 40, other bits among other rows in 3 of 12"
    assert line.strip() == said
    assert measured.worst["y"].case in verbose.getvalue()
    assert "only on Sundays" in verbose.getvalue()
    assert said not in plain.getvalue()
    assert "only on Sundays" not in plain.getvalue()


def test_rest_after_live_does_not_repeat_the_cells() -> None:
    stream = io.StringIO()
    terminal.render(failing(), _text.console_for(stream, width=80), cells=False)
    assert stream.getvalue() in written(failing())
    assert "pass  rmsnorm" not in stream.getvalue()


@pytest.mark.parametrize(("frames", "says"), [(("mine.py:3",), "raises an exception"), ((), "something is wrong")])
def test_what_raises_in_a_context_is_not_said_to_be_wrong(frames: tuple[str, ...], says: str) -> None:
    found = Finding(kind="context", output="", check="inference", case="", message="", reproduce="", traceback=frames)
    assert f"{says} in another context (inference)" in written(run(failed(found), status="fail"))
