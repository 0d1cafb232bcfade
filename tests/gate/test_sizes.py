"""Which profile asks for which sizes on a GPU; what needs more memory than there is, is refused in so many words."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from normcheck.cases.beyond import EXTREME, LARGE
from normcheck.cases.case import HUGE_ELEMENTS, Case
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.cases.planned import Planned
from normcheck.checks import attempt, gpu_memory
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.observe import Seen
from normcheck.errors import Broken
from normcheck.gate import sequence, sweep
from normcheck.gate.plan import PROFILES, Plan, planner_of
from normcheck.gate.sequence import Asked, Sequence, _After
from normcheck.gate.tally import Tally
from normcheck.impls.implementation import Implementation
from normcheck.oracle.tolerances import table
from tests.case_lines import case_of

MINE = Implementation(name="mine", op="rmsnorm", forward=lambda *_, **__: torch.zeros(0), strided=False)
HUGE = case_of(f"rmsnorm fp16 M={2**19 + 1} N=4096")


def cell_of(dtype: str = "fp16") -> Cell:
    return Cell(OPS["rmsnorm"], MINE, dtype, "mine.py")


def asked(profile: str, dtype: str, device: str, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> list[Case]:
    """The cases that a cell is asked for beside its core, if each takes no time."""
    seen: list[Case] = []

    def run(cell: Cell, case: Case, plan: Plan, *_: Any, **__: Any) -> Result:
        seen.append(case)
        return Result(case, table().model)

    monkeypatch.setattr(sweep, "run_surely", run)
    monkeypatch.setattr(sweep.Planner, "next", lambda self: None)
    cell = cell_of(dtype)
    plan = Plan((cell,), replace(PROFILES[profile], max_examples=80), 0, device, 1.0)
    monkeypatch.setattr(sweep.Sequence, "is_too_slow", lambda self, asked: False)
    core = sweep.planner_of(cell, plan)
    sweep._first_failing(cell, plan, Tally(table().model), lambda *_: None, core, sweep.InTurn(cell, plan, core))
    return seen


@pytest.mark.parametrize(
    ("profile", "dtype", "device", "rows"),
    [
        ("quick", "fp16", "cuda", []),
        ("ci", "fp16", "cuda", [2**19 + 1]),
        ("ci", "bf16", "cuda", [2**19 + 1]),
        ("ci", "fp32", "cuda", []),
        ("ci", "fp16", "cpu", []),
        ("deep", "fp16", "cuda", [2**19 + 1, 2**20 + 1]),
    ],
)
def test_what_each_profile_asks_for(
    profile: str, dtype: str, device: str, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = asked(profile, dtype, device, monkeypatch)
    assert [case.M for case in cases if case.huge] == rows
    assert [case.M for case in cases[: len(rows)]] == rows  # before the clock starts
    sizes = {(case.M, case.N) for case in cases}
    assert (set(EXTREME) <= sizes) == (profile != "quick" and device == "cuda")
    assert not set(EXTREME) & sizes or profile != "quick"
    assert set(LARGE[device]) <= sizes


def test_long_rows_are_left_out_if_they_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, now = cell_of(), [0.0]
    monkeypatch.setattr(sequence.time, "perf_counter", lambda: now[0])
    core = planner_of(cell, Plan((cell,), PROFILES["ci"], 0, "cpu", 1.0))
    monkeypatch.setattr(core, "next", lambda: None)
    asked_of = Sequence(cell, Plan((cell,), PROFILES["ci"], 0, "cpu", 1.0), core, lambda: 0)
    next(iter(asked_of))  # the time after a core begins
    long, short = (
        Asked(Planned(case_of(f"rmsnorm fp16 M=2 N={n}"), Depth.REASON), is_large=True) for n in (2**20, 8192)
    )
    core.saw_another(case_of("rmsnorm fp16 M=2 N=16"), Depth.REASON, refused=False, seconds=0.01)
    assert not asked_of.is_too_slow(long)
    core.saw_another(case_of("rmsnorm fp16 M=2 N=20000"), Depth.REASON, refused=False, seconds=1.0)
    assert asked_of.is_too_slow(long) and not asked_of.is_too_slow(short)
    assert not asked_of.is_too_slow(replace(long, is_large=False))
    asked_of.number = 8  # every eighth case has the probes of rows, five and a half runs: 0.2 s for the short one
    of = {"long": _After(long.planned.case, is_large=True), "short": _After(short.planned.case, is_large=True)}
    assert asked_of._planned(of["short"]).probe == Depth.ROWS
    assert asked_of._planned(of["long"]).probe == Depth.REASON
    assert asked_of._planned(of["long"]._replace(is_large=False)).probe == Depth.ROWS
    now[0] = 44.0  # an eighth of what is left is no time for it
    assert asked_of._planned(of["short"]).probe == Depth.REASON
    now[0] = 44.9
    assert asked_of.is_too_slow(short)


GIB = 1 << 30


def test_no_large_case_is_left_out_for_what_a_profile_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core of groupnorm and what follows it may be more than 400 cases: then the largest shapes were never asked."""
    mine = Implementation(name="mine", op="groupnorm", forward=lambda *_, **__: torch.zeros(0))
    cell = Cell(OPS["groupnorm"], mine, "fp32", "mine.py")
    allowed = 370

    def shapes() -> list[tuple[int, int]]:
        plan = Plan((cell,), replace(PROFILES["quick"], max_examples=allowed), 0, "cuda", 60.0)
        ran: list[tuple[int, int]] = []
        following = Sequence(cell, plan, planner_of(cell, plan), lambda: len(ran))
        for each in following:
            ran.append((each.planned.case.M, each.planned.case.N))
            following.saw(each, refused=False, seconds=0.0)
        return ran

    assert len(shapes()) == allowed  # somebody asked for so many
    monkeypatch.setitem(PROFILES, "quick", replace(PROFILES["quick"], max_examples=allowed))
    every = shapes()
    assert len(every) > allowed and {(8192, 8192), (4096, 65536)} <= set(every)


def test_more_than_2_to_the_31_elements_fit_into_80_gb() -> None:
    """With 8 GiB for the memory that all cases share, and as much for contexts and the kernel itself."""
    for op in ("rmsnorm", "layernorm", "rmsnorm_llama"):
        case = replace(HUGE, op=op)
        assert 12 * 4 * GIB < attempt._needed(case, "cuda") < (79 - 16) * GIB
    clamped = replace(HUGE, op="layernorm_relu_bitmask", options=(("lower_clip", 0.0), ("upper_clip", 6.0)))
    assert attempt._needed(clamped, "cuda") < (79 - 8) * GIB
    assert attempt._needed(replace(HUGE, M=2**20 + 1), "cuda") < (139 - 16) * GIB


def test_what_does_not_fit_is_refused_with_how_much_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "memory_bytes", lambda device: 40 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * GIB, 48 * GIB))  # it will never be free
    cell = cell_of()
    result = attempt.run_case(cell, HUGE, Plan((cell,), PROFILES["ci"], 0, "cuda", 1.0))
    assert result.refused == "needs about 50.6 GiB of 40.0 GiB"


def test_memory_that_comes_free_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter((10 * GIB, 10 * GIB, 70 * GIB))
    monkeypatch.setattr(attempt, "memory_bytes", lambda device: next(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert attempt._no_room(HUGE, "cuda") == ""


def test_running_out_of_memory_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> Result:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(attempt, "memory_bytes", lambda device: 60 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cell = cell_of()
    result = attempt.attempted(cell, HUGE, Plan((cell,), PROFILES["ci"], 0, "cuda", 1.0), work)
    assert isinstance(result, Result)
    assert result.refused == "judging it needs about 50.6 GiB of 60.0 GiB of the GPU's memory"


def test_a_case_that_ran_out_of_memory_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose share was full for good refused every later case, of 3 MB too: seen on two H100s."""
    held: list[weakref.ref[torch.Tensor]] = []
    there: list[bool] = []

    def work() -> Result:
        tensor = torch.empty(1000)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError

    def memory_bytes(device: str) -> int:
        there.extend(tensor() is not None for tensor in held)
        return 60 * GIB

    monkeypatch.setattr(attempt, "memory_bytes", memory_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(attempt, "_no_room", lambda case, device: "")
    cell = cell_of()
    attempt.attempted(cell, HUGE, Plan((cell,), PROFILES["ci"], 0, "cuda", 1.0), work)
    assert there == [False]


def test_memory_that_only_a_cycle_of_objects_holds_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        """What an earlier case has left: it refers to itself, so that only a collection ends it."""

        def __init__(self) -> None:
            self.itself = self

    ended: list[bool] = []
    held = Held()
    weakref.finalize(held, ended.append, True)
    del held
    monkeypatch.setattr(attempt, "memory_bytes", lambda device: 60 * GIB if ended else GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cell, large = cell_of(), replace(HUGE, M=2**14, N=2**14)
    right = Result(large, table().model)
    assert attempt.attempted(cell, large, Plan((cell,), PROFILES["ci"], 0, "cuda", 1.0), lambda: right) is right
    assert ended


@pytest.mark.parametrize(
    ("fields", "depth"),
    [
        ({"M": 2**14, "N": 2**14}, Depth.ROWS),
        ({"M": 2**14, "N": 2**13, "layout": "x_strided", "gap": 2**14}, Depth.REASON),
        ({"M": 2**14 + 1, "N": 2**14}, Depth.OFF),
    ],
)
def test_a_case_of_many_elements_is_probed_less(fields: dict[str, Any], depth: Depth) -> None:
    assert HUGE_ELEMENTS == 2**28
    assert attempt.deepest(replace(HUGE, **fields)) == depth


SAID = (
    "forward raised OutOfMemoryError: CUDA out of memory. Tried to allocate 770.00 MiB. GPU 0 has a total capacity of "
    "79.18 GiB of which {free} is free. Process 7 has 70.00 GiB memory in use. Including non-PyTorch memory, this "
    "process has {own} memory in use."
)


@pytest.mark.parametrize(
    ("free", "own", "now", "others"),
    [
        ("434.88 MiB", "3.20 GiB", 70 * GIB, True),  # they have ended since
        ("71.06 MiB", "18.50 GiB", 70 * GIB, True),  # of which its allocator keeps what earlier cases took
        ("434.88 MiB", "71.50 GiB", 70 * GIB, False),
        ("78.00 GiB", "520.00 MiB", 70 * GIB, False),
        ("78.00 GiB", "520.00 MiB", 2 * GIB, True),
    ],
)
def test_a_kernel_without_memory_is_blamed_unless_others_had_it(
    free: str, own: str, now: int, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (now, 80 * GIB))
    case = replace(HUGE, M=2, N=320)
    assert (
        bool(gpu_memory.others_have_it(Broken("exception", "", SAID.format(free=free, own=own)), case, "cuda"))
        is others
    )


DRIVERS = "raised AcceleratorError: CUDA error: out of memory"  # it does not say who has the memory


@pytest.mark.parametrize(("now", "blamed"), [(3 * GIB, False), (70 * GIB, True)])
def test_a_call_outside_forward_and_backward_is_blamed_like_them(
    now: int, blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a copy of the inputs to a GPU that is full, or a context."""

    def work() -> Result:
        raise Broken("exception", "", DRIVERS)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (now, 80 * GIB))
    plan = Plan((cell_of(),), PROFILES["quick"], 0, "cuda", 20.0)
    result = attempt.attempted(cell_of(), replace(HUGE, M=2, N=3), plan, work)
    assert bool(result.problems) is blamed
    assert result.refused == ("" if blamed else "the GPU's memory is in use: 3.0 GiB are free")


@pytest.mark.parametrize(("refused", "found"), [("the GPU's memory is in use: 3.0 GiB are free", 0), ("M is even", 1)])
def test_a_first_case_that_finds_no_memory_at_the_end_has_not_changed(
    refused: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, model = replace(HUGE, M=2, N=3), table().model
    tally = Tally(model)
    tally.first = Result(case, model, seen=Seen({"y": torch.ones(2, 3)}))
    tally.cases = 1000
    monkeypatch.setattr(sweep, "run_surely", lambda *_: Result(case, model, refused=refused))
    assert len(sweep._first_again(cell_of(), Plan((cell_of(),), PROFILES["quick"], 0, "cuda", 20.0), tally)) == found
