"""Golden records: what is recorded holds when it is judged again, a flipped bit does not, and a diff counts ulps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normcheck.audit.mutants.correct import CONTROLS
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.plan import PROFILES, Plan
from normcheck.golden.cases import cases
from normcheck.golden.diff import difference_of
from normcheck.golden.judge import judge_recorded
from normcheck.golden.record import record_case, record_plan
from normcheck.golden.schema import AUTOGRAD, BITMASK, FED, GIVEN, OWN, STATISTICS, Record, RecordedCase
from normcheck.golden.store import read, write
from normcheck.golden.verify import verify_record
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judge_forward import judge_forward
from normcheck.result import CellKey
from tests.command_line import Cli
from tests.some import some

MAKES = ("pairwise_fma", "autograd_var")
"""One with a backward of its own, one through autograd."""
SEVEN = (*MAKES, "blocked1024_n_scaled", "chan_blocks", "welford_tree_fma", "fp64_inside", "raw_backward")


def plan_of(*names: str, dtypes: tuple[str, ...] = DTYPES) -> Plan:
    ops = OPS
    cells = tuple(Cell(ops[c.op], c, d, c.name) for c in CONTROLS if c.name in names for d in dtypes)
    return Plan(cells, PROFILES["quick"], 0, "cpu", 60.0)


def recorded(*names: str, dtypes: tuple[str, ...] = DTYPES) -> Record:
    return record_plan(plan_of(*names, dtypes=dtypes), lambda number, cell: None)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As the commands have it: a second thread waits longer than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def record() -> Record:
    return recorded(*MAKES)


def flipped(tensor: Tensor) -> Tensor:
    """The tensor with one bit of its largest element flipped: the highest of the mantissa, of a 0 that of the
    exponent; the first bit of a bitmask."""
    tensor = tensor.clone()
    if tensor.dtype in (torch.bool, torch.uint8):
        tensor.view(torch.uint8).view(-1)[0] ^= 1
        return tensor
    width = 8 * tensor.element_size()
    mantissa = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}[tensor.dtype]
    at = int(tensor.abs().argmax())
    bit = mantissa - 1 if float(tensor.flatten()[at]) else width - 2
    tensor.view(torch.int16 if width == 16 else torch.int32).view(-1)[at] ^= 1 << bit
    return tensor


def changed(entry: RecordedCase, **tensors: Tensor) -> RecordedCase:
    return replace(entry, tensors={**entry.tensors, **tensors})


def checks(result: Result) -> set[tuple[str, str]]:
    return {(c.output, c.check) for c in result.checked}


# what holds


@pytest.mark.slow
def test_every_entry_of_a_correct_kernel_holds(record: Record) -> None:
    """Of each op and dtype; each second one, and the others with a flipped bit below."""
    assert len(record.entries) == 2 * 3 * (3 * 9 + 7 + 5)
    for entry in some(record.entries[::2]):
        result = judge_recorded(entry, "cpu")
        assert not result.failed, entry.key
        assert not result.refused
        assert {"y", "dx", "dw"} <= {c.output for c in result.checked}


@pytest.mark.slow
def test_a_record_is_checked_as_a_run_is(record: Record) -> None:
    """The same checks as of the implementation itself, none fewer."""
    from normcheck.checks.check import check

    by_name = {(c.name, c.op): c for c in CONTROLS}
    for entry in some(record.entries[::5]):
        implementation = by_name[entry.implementation, entry.case.op]
        live = check(implementation, OPS[entry.case.op], entry.case, "cpu", UNPROBED)
        again = judge_recorded(entry, "cpu")
        assert checks(again) == checks(live)
        assert {(c.output, c.check, c.comparison.ratio) for c in again.checked} == {
            (c.output, c.check, c.comparison.ratio) for c in live.checked
        }
        assert (again.model, again.not_returned) == (live.model, live.not_returned)


@pytest.mark.slow
def test_every_flipped_bit_is_judged_wrong(record: Record) -> None:
    """With all checksums made anew: what catches it is the judge. An entry's tensors take turns from case to case."""
    missed = [
        (entry.key, name)
        for number, entry in enumerate(record.entries[1::2])
        for name, tensor in islice(entry.tensors.items(), number % 3, None, 3)
        if not judge_recorded(changed(entry, **{name: flipped(tensor)}), "cpu").failed
    ]
    assert missed == []


def test_fed_statistics_may_be_one_ulp_off_and_no_more(record: Record) -> None:
    """What backward was fed with is fp64 rounded on another machine."""
    entry = next(e for e in record.entries if STATISTICS in e.reads and e.case.dtype == "fp16")
    one = torch.nextafter(entry.tensors[FED + "rstd"], torch.tensor(torch.inf))
    assert not judge_recorded(changed(entry, **{FED + "rstd": one}), "cpu").problems
    two = torch.nextafter(one, torch.tensor(torch.inf))
    assert [p.output for p in judge_recorded(changed(entry, **{FED + "rstd": two}), "cpu").problems] == ["rstd"]


@pytest.mark.slow
def test_a_tighter_bound_shows_whom_it_hits(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    from normcheck.oracle import forward_bounds

    monkeypatch.setattr(forward_bounds, "plus_store", lambda rules, e, size, fmt, output: e.clone())
    run = verify_record(record, "golden", ()).run
    assert run.exit_code == 1
    assert any(verdict.status == "fail" for verdict in run.verdicts)


# how it is recorded


def one_case(implementation: Implementation, number: int = 0) -> RecordedCase:
    op = OPS[implementation.op]
    case = list(cases(op, implementation, "fp16"))[number]
    return record_case(Cell(op, implementation, "fp16", "test"), case, plan_of())


def control(name: str, op: str) -> Implementation:
    return next(c for c in CONTROLS if (c.name, c.op) == (name, op))


def test_where_gradients_come_from(record: Record) -> None:
    for entry in some(record.entries):
        own = entry.implementation == MAKES[0]
        assert entry.backward == (OWN if own else AUTOGRAD)
        assert (
            entry.reads == ((STATISTICS, BITMASK) if entry.case.op == "layernorm_relu_bitmask" else (STATISTICS,)) * own
        )
        assert any(name.startswith(GIVEN) for name in entry.tensors) == own
        assert "dx" in entry.tensors


def test_what_was_fed_is_the_references(record: Record) -> None:
    entry = next(e for e in record.entries if e.reads)
    op = OPS[entry.case.op]
    judge = judge_of(op, entry.case, make(entry.case, op, "cpu"), judge_recorded(entry, "cpu").model, {})
    saved = judge_forward(judge, {"y": entry.tensors["y"]})[1]
    assert torch.equal(entry.tensors[FED + "rstd"], saved.rstd.flatten())


def test_a_backward_that_reads_no_statistics_is_judged_end_to_end_only() -> None:
    right = control("pairwise_fma", "rmsnorm")

    def backward(dy, x, weight, bias, saved, *, eps):  # type: ignore[no-untyped-def]
        again = right.forward(x, weight, bias, eps=eps)
        return right.backward(dy, x, weight, bias, again, eps=eps)  # type: ignore[misc]

    entry = one_case(replace(right, backward=backward))
    assert entry.reads == ()
    assert not [name for name in entry.tensors if name.startswith((GIVEN, FED))]
    assert not judge_recorded(entry, "cpu").failed
    assert ("dx", "end to end") in checks(judge_recorded(entry, "cpu"))


def test_a_wrong_kernel_is_recorded_and_does_not_hold() -> None:
    right = control("pairwise_fma", "rmsnorm")

    def forward(x, weight, bias, *, eps):  # type: ignore[no-untyped-def]
        outputs = right.forward(x, weight, bias, eps=eps)
        return {**outputs, "y": outputs["y"] * 1.01}

    entry = one_case(replace(right, forward=forward))
    assert {c.output for c in judge_recorded(entry, "cpu").wrong} == {"y"}


@pytest.mark.parametrize("what", ["raises", "refuses", "wrong dtype", "no gradients"])
def test_what_goes_wrong_is_in_the_record(what: str, tmp_path: Path) -> None:
    from normcheck import UnsupportedCase

    right = control("pairwise_fma", "layernorm")

    def forward(x, weight, bias, *, eps):  # type: ignore[no-untyped-def]
        if what == "raises":
            raise RuntimeError("no\nkernel")
        if what == "refuses":
            raise UnsupportedCase("M=5 is too odd")
        outputs = right.forward(x, weight, bias, eps=eps)
        return {**outputs, "mean": outputs["mean"].double()} if what == "wrong dtype" else outputs

    def backward(*arguments, **options):  # type: ignore[no-untyped-def]
        if what == "no gradients":
            raise UnsupportedCase("no engine")
        return right.backward(*arguments, **options)  # type: ignore[misc]

    entry = one_case(replace(right, forward=forward, backward=backward))
    write(Record(device="cpu", environment={}, entries=(entry,)), tmp_path / "r")
    (again,) = read(tmp_path / "r").entries
    result = judge_recorded(again, "cpu")
    if what == "raises":
        assert [(p.kind, p.message) for p in result.problems] == [
            ("exception", "forward raised RuntimeError: no kernel")
        ]
    elif what == "refuses":
        assert result.refused == "M=5 is too odd"
    elif what == "wrong dtype":
        assert (result.problems[0].kind, result.problems[0].output) == ("dtype", "mean")
        assert {"y", "rstd"} == {c.output for c in result.checked}
    else:
        assert result.not_returned == ("dx", "dw", "db")
        assert result.seen.refused == "no engine"
        assert not result.failed
        (cell,) = verify_record(Record(device="cpu", environment={}, entries=(again,)), "r", ()).run.verdicts
        assert (cell.status, cell.no_backward, dict(cell.backward_refused)) == ("pass", True, {"no engine": 1})
        assert cell.notes == ("no backward ran, so no gradient was checked: no engine (1 cases)",)


@pytest.mark.slow
def test_recording_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(recorded("pairwise_fma", dtypes=("fp16",)), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["manifest.json", "pairwise_fma.safetensors"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.slow
def test_a_full_record_is_small_and_judged_in_seconds(tmp_path: Path) -> None:
    """Seven implementations and four ops in the largest dtype, which takes 46 % of a record of all three."""
    size = write(recorded(*SEVEN, dtypes=("fp32",)), tmp_path / "full")
    assert size < 0.46 * 4_700_000  # golden/ is to stay below 5 MB with what else is in it
    start = time.perf_counter()
    found = verify_record(read(tmp_path / "full"), "full", ())
    assert (found.run.exit_code, len(found.run.verdicts)) == (0, 28)
    assert found.checks > 1800
    assert time.perf_counter() - start < 30  # 1 s on an idle core


# what moved


def test_the_same_record_has_not_moved(record: Record) -> None:
    found = difference_of((record, record), ("a", "b"))
    assert not found.changed
    assert found.cases == len(record.entries)


def test_a_diff_counts_ulps_and_names_the_case(record: Record) -> None:
    entry = record.entries[3]
    y = entry.tensors["y"].clone()
    y.view(torch.int16)[0, :2] += torch.tensor([1, -3], dtype=torch.int16)
    bits = next(e for e in record.entries if e.case.op == "layernorm_relu_bitmask" and e.implementation == MAKES[0])
    mask = flipped(bits.tensors[BITMASK])
    swap = {entry.key: changed(entry, y=y), bits.key: changed(bits, bitmask=mask)}
    after = replace(
        record,
        environment={**record.environment, "torch": "9.9"},
        entries=tuple(swap.get(e.key, e) for e in record.entries),
    )
    found = difference_of((record, after), ("a", "b"))
    moved = {(cell.key.op, m.output): m for cell in found.cells for m in cell.moved}
    assert set(moved) == {(entry.case.op, "y"), (bits.case.op, "bitmask")}
    one = moved[entry.case.op, "y"]
    assert (one.elements, one.cases, one.ulps, one.case) == (2, 1, 3.0, str(entry.case))
    assert moved[bits.case.op, "bitmask"].ulps is None
    assert found.facts == {"torch": (record.environment["torch"], "9.9")}


@pytest.mark.parametrize(
    ("before", "after", "ulps"), [(0.0, -0.0, 0.0), (2.0**-149, -(2.0**-149), 2.0), (1.0, float("nan"), float("inf"))]
)
def test_ulps_across_zero_and_to_nan(record: Record, before: float, after: float, ulps: float) -> None:
    entry = next(e for e in record.entries if e.case.dtype == "fp32")
    pair = [replace(record, entries=(changed(entry, rstd=torch.full((entry.case.M,), v)),)) for v in (before, after)]
    (cell,) = difference_of((pair[0], pair[1]), ("a", "b")).cells
    assert [m.ulps for m in cell.moved] == [ulps]


def test_a_diff_says_what_is_in_one_only(record: Record) -> None:
    first = record.entries[0]
    refused = replace(first, tensors={}, refused="too old", reads=())
    a = replace(record, entries=record.entries[:2])
    b = replace(record, entries=(refused, record.entries[2]))
    found = difference_of((a, b), ("a", "b"))
    assert found.only == ({CellKey("layernorm", first.implementation, "fp16"): 1},) * 2
    assert found.cells[0].notes == ("refused only in the second: too old",)


# the command line


@pytest.fixture
def run(cli: Cli) -> Cli:
    """normcheck golden."""
    return partial(cli, "golden")


HERE = ("--impl", "torch", "--dtype", "fp16", "--device", "cpu", "--op")


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["--isolation", "--no-isolation"])
def test_record_verify_diff(run: Cli, isolation: str) -> None:
    done = run("record", *HERE, "rmsnorm", isolation, "--out", "a")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1].startswith("PASS  1 cell passed")
    again = run("verify", "a")
    assert (again.code, again.err) == (0, "")
    assert "checks of recorded outputs" in again.out.splitlines()[0]
    assert max(map(len, again.out.splitlines()[:-1])) <= 80
    assert run("record", *HERE, "rmsnorm", "--no-isolation", "--out", "b").code == 0
    same = run("diff", "a", "b")
    assert (same.code, same.out.splitlines()[-1]) == (0, "SAME  1 cell, 9 cases: the same bits")


def test_a_record_is_not_overwritten(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    done = run("record", *HERE, "rmsnorm", "--out", "a")
    assert (done.code, done.out) == (2, "")
    assert done.err == "normcheck: out=a: exists; expected a new folder, so remove it first\n"
    (tmp_path / "file").touch()
    done = run("record", *HERE, "rmsnorm", "--out", "file/a")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert f"writable, {tmp_path / 'file'} is not" in done.err
    assert run("record", *HERE, "rmsnorm", "--out", "new/folders/b").code == 0
    assert (tmp_path / "new" / "folders" / "b" / "manifest.json").is_file()


def test_a_verdict_says_what_one_of_a_sweep_says(record: Record) -> None:
    """Which case failed first, of what nothing is known, and what was refused."""
    first, second, third = record.entries[:3]
    wrong = changed(second, y=flipped(second.tensors["y"]))
    refused = replace(third, tensors={}, reads=(), refused="too old")
    (cell,) = verify_record(replace(record, entries=(first, wrong, refused)), "a", ()).run.verdicts
    assert (cell.status, cell.cases, cell.failed_at) == ("fail", 2, 1)
    assert cell.skipped == {"too old": 1}
    assert "1 of 2 cases do not hold" in cell.notes
    (skip,) = verify_record(replace(record, entries=(refused,)), "a", ()).run.verdicts
    assert (skip.status, skip.detail, skip.skipped) == ("skip", "too old (1 cases)", {"too old": 1})


def test_a_wrong_bitmask_of_a_gpu_is_told_without_one() -> None:
    """A record says which device it is of; what is judged is here, and so is the finding's reference."""
    there = read(Path(__file__).parents[2] / "golden" / "h200" / "cudnn")
    kept = next(entry for entry in there.entries if BITMASK in entry.tensors)
    record = Record(device="cuda", environment={}, entries=(changed(kept, bitmask=kept.tensors[BITMASK] ^ 1),))
    (cell,) = verify_record(record, "a", ()).run.verdicts
    assert cell.failure is not None
    assert cell.failure.output == BITMASK


def test_what_does_not_hold_exits_with_1(run: Cli, tmp_path: Path, record: Record) -> None:
    entry = record.entries[0]
    for name, kept in (("a", entry), ("b", changed(entry, y=flipped(entry.tensors["y"])))):
        write(replace(record, entries=(kept,)), tmp_path / name)
    done = run("verify", "a", "b")
    assert done.code == 1
    assert done.out.splitlines()[-1].startswith("FAIL  1 of 1 cell failed: layernorm/pairwise_fma fp16 (y)")
    assert "normcheck golden verify b" in done.out
    moved = run("diff", "a", "b")
    assert (moved.code, moved.out.splitlines()[-1]) == (1, "MOVED  1 of 1 cell, at most 512 ulp")
    assert str(entry.case) in moved.out


def test_other_cases_are_a_difference(run: Cli, tmp_path: Path, record: Record) -> None:
    for name, count in (("a", 2), ("b", 1)):
        write(replace(record, entries=record.entries[:count]), tmp_path / name)
    done = run("diff", "a", "b")
    assert done.code == 1
    last = "SAME BITS, OTHER CASES  1 cell, 1 case: the same bits; 1 case only in the first"
    assert done.out.splitlines()[-1] == last


def test_nothing_checked_is_5(run: Cli, tmp_path: Path, record: Record) -> None:
    done = run("record", "--impl", "cudnn", "--op", "layernorm", "--device", "cpu", "--no-isolation", "--out", "a")
    assert (done.code, (tmp_path / "a").exists()) == (5, False)
    first = record.entries[0]
    write(replace(record, entries=(replace(first, tensors={}, reads=(), refused="too old"),)), tmp_path / "a")
    write(replace(record, entries=record.entries[1:2]), tmp_path / "b")
    assert run("verify", "a").code == 5
    assert run("verify", "a", "b").code == 5
    assert run("diff", "a", "b").code == 5


def test_foreign_names_do_nothing_to_the_terminal(run: Cli, tmp_path: Path, record: Record) -> None:
    entry = replace(record.entries[0], implementation="[red]x[/red] \x1b[2J ::error::")
    other = changed(entry, y=flipped(entry.tensors["y"]))
    for name, kept in (("a", entry), ("b", other)):
        write(replace(record, environment={"device": "[bold]\x1b]0;x"}, entries=(kept,)), tmp_path / name)
    for argv in (("verify", "a"), ("verify", "b"), ("diff", "a", "b")):
        done = run(*argv)
        assert "\x1b" not in done.out
        assert "[red]x[/red]" in done.out


def test_the_manifest_says_where_it_comes_from(run: Cli, tmp_path: Path) -> None:
    run("record", *HERE, "rmsnorm", "--no-isolation", "--out", "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["schema"] == "normcheck-golden/1"
    assert manifest["environment"]["torch"] == torch.__version__
    assert set(manifest["files"]) == {"torch.safetensors"}
    assert all(set(entry["inputs"]) >= {"x", "weight", "dy"} for entry in manifest["entries"])
