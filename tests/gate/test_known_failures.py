"""Known failures and the gate that decides: what is known is no news, and what is not true any more fails."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.errors import UsageError
from normcheck.gate.decision import Terms, concluded, decide
from normcheck.gate.known_failures import LARGEST_BYTES, Known, marked, read, stale
from normcheck.reports._plain_text import outcome
from normcheck.result import CellKey, Verdict
from tests.sample_runs import failed, finding, run, skipped, verdict

ENTRY = Known(CellKey("rmsnorm", "mine.py", "fp16"), "dw sums in fp16", "known.txt:3")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "known.txt"
    path.write_text(
        "# a comment\n\n  rmsnorm   mine.py:f  fp16   # dw sums in fp16, https://x.org/#7 \n"
        "layernorm a b c# bf16 # y\n",
        encoding="utf-8",
    )
    assert read(str(path)) == (
        Known(CellKey("rmsnorm", "mine.py:f", "fp16"), "dw sums in fp16, https://x.org/#7", f"{path}:3"),
        Known(CellKey("layernorm", "a b c#", "bf16"), "y", f"{path}:4"),
    )


WRONG = {
    "rmsnorm mine fp16": "expected a reason behind it",
    "rmsnorm mine fp16 #": "expected a reason behind it",
    "rmsnorm fp16 # why": "expected 'OP IMPLEMENTATION DTYPE  # reason'",
    "rmsnorm": "expected 'OP IMPLEMENTATION DTYPE  # reason'",
    "norm mine fp16 # why": "op=norm: expected one of layernorm",
    "rmsnorm mine fp64 # why": "dtype=fp64: expected one of fp16",
    "rmsnorm mine fp16 # why\nrmsnorm mine fp16 # again": "has this cell as well",
    "rmsnorm \x1b[31m": "expected 'OP",
    "x" * 100_000: "expected 'OP",
}


@pytest.mark.parametrize("content", WRONG, ids=lambda content: content[:24])
def test_lines_that_are_wrong(tmp_path: Path, content: str) -> None:
    path = tmp_path / "known.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        read(str(path))
    message = str(raised.value)
    assert f"{path}:{content.count(chr(10)) + 1}: " in message
    assert WRONG[content] in message
    assert message.isprintable()
    assert len(message) < 700


def test_files_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "known.txt"
    for name, expected in (
        ("missing.txt", "No such file"),
        (".", "Is a directory"),
        ("nul\0", "expected a file that can be read"),
    ):
        with pytest.raises(UsageError, match=expected):
            read(str(tmp_path / name))
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="expected text in UTF-8"):
        read(str(path))
    path.write_bytes(b"#" * (LARGEST_BYTES + 1))
    with pytest.raises(UsageError, match="expected at most"):
        read(str(path))


def test_only_what_failed_is_marked() -> None:
    cell = failed(finding())
    assert marked(cell, [ENTRY]).known == "dw sums in fp16"
    assert marked(replace(cell, dtype="bf16"), [ENTRY]).known == ""
    assert marked(replace(cell, status="error"), [ENTRY]).known == ""
    assert marked(replace(cell, status="pass", failure=None), [ENTRY]).known == ""


def test_stale_entries() -> None:
    cell = failed(finding())
    assert stale([ENTRY], [cell]) == ()
    assert stale([ENTRY], [replace(cell, status="skip", failure=None)]) == ()
    (message,) = stale([ENTRY], [replace(cell, status="pass", failure=None)])
    assert message == "known.txt:3: known failure 'rmsnorm mine.py fp16' passes now: remove the line"
    (message,) = stale([ENTRY], [verdict()])
    assert message == "known.txt:3: known failure 'rmsnorm mine.py fp16' matches no cell of this run: remove the line"
    assert stale([ENTRY], [verdict()], part=True) == ()


def test_a_mark_of_the_byte_order_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "known.txt"
    path.write_bytes(b"\xef\xbb\xbfrmsnorm mine.py fp16  # dw sums in fp16\r\n\r\n# more\r\n")
    assert read(str(path)) == (replace(ENTRY, where=f"{path}:1"),)


KNOWN = failed(finding(), known="why")
CELLS = {
    "pass": verdict(),
    "fail": failed(finding()),
    "known": KNOWN,
    "skip": skipped(),
    "error": verdict(status="error"),
}
EXPECTED = {"fail": ("fail", 1), "error": ("error", 3), "known": ("pass", 0), "pass": ("pass", 0)}


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_every_mixture_of_cells(size: int) -> None:
    for names in itertools.product(CELLS, repeat=size):
        first = next((name for name in EXPECTED if name in names), None)
        expected = EXPECTED[first] if first else ("nothing", 5)
        cells = [CELLS[name] for name in names]
        assert decide(cells, Terms()) == (*expected, ()), names
        assert decide(cells, Terms(), complete=False) == (expected[0], 130, ()), names


def test_a_run_in_which_all_is_known_to_fail_says_that_nothing_passed() -> None:
    alone = concluded(run(KNOWN, skipped()), Terms(known=(ENTRY,)))
    assert (alone.status, alone.exit_code) == ("pass", 0)
    assert alone.messages == ("nothing passed: each cell that ran is a known failure",)
    assert outcome(alone).startswith("NOTHING PASSED  0 cells passed, 1 failed as known")
    among = concluded(run(KNOWN, verdict()), Terms(known=(ENTRY,)))
    assert (among.messages, outcome(among)[:4]) == ((), "PASS")


def test_stale_and_required() -> None:
    def decided(*cells: Verdict, **terms: object) -> tuple[str, int, int]:
        status, code, messages = decide(cells, Terms(**terms))  # type: ignore[arg-type]
        return status, code, len(messages)

    assert decided(verdict(), known=(ENTRY,)) == ("fail", 1, 1)
    assert decided(verdict(), known=(ENTRY,), part=True) == ("pass", 0, 0)
    assert decided(verdict(), KNOWN, known=(ENTRY,)) == ("pass", 0, 0)
    assert decided(verdict(), skipped(), required=("cudnn",)) == ("nothing", 5, 1)
    assert decided(verdict(), skipped(), required=("cudnn",), known=(ENTRY,)) == ("fail", 1, 2)
    assert decided(verdict(), KNOWN, skipped(), required=("mine.py",)) == ("pass", 0, 0)
    assert decided(verdict(), required=("absent",)) == ("nothing", 5, 1)


def test_what_is_required_ran_in_each_dtype_that_was_asked_for() -> None:
    other = replace(verdict(), dtype="fp16" if verdict().dtype != "fp16" else "bf16", status="skip", detail="declares")
    mine = verdict().implementation
    assert decide([verdict(), other], Terms(required=(mine,)))[1] == 0
    _, code, messages = decide([verdict(), other], Terms(required=(mine,), dtypes=(verdict().dtype, other.dtype)))
    assert (code, len(messages)) == (5, 1)
    assert f"{other.op} {other.dtype}: declares" in messages[0]
