"""What ran on a GPU, in words: from a profiler's events and the sizes of cases to the lines of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from normcheck.circumstances import Ran
from normcheck.contexts.profiler import kernels
from normcheck.reports import terminal
from normcheck.reports._ran import changes, changing, lines
from tests.sample_runs import run, verdict


@dataclass
class Event:
    """In place of torch.autograd.profiler_util.FunctionEvent."""

    name: str
    start: float
    device_type: Any = DeviceType.CUDA
    is_user_annotation: bool = False

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=self.start)


def launched(*names: str) -> list[Event]:
    """The events of a call that launches kernels of these names, as a profiler lists them: not in their order."""
    of_gpu = [Event(name, start) for start, name in enumerate(names)][::-1]
    noise = [Event("cudaLaunchKernel", 0.1, DeviceType.CPU), Event("Memcpy DtoD (Device -> Device)", 0.2)]
    return [
        *noise,
        *of_gpu,
        Event("Memset (Device)", 0.3),
        Event("## Call CompiledFxGraph ##", 0.4, is_user_annotation=True),
    ]


def ran(m: int, n: int, forward: list[Event], backward: Sequence[Event] = (), built: int | None = None) -> Ran:
    return Ran(M=m, N=n, forward=tuple(kernels(forward)), backward=tuple(kernels(backward)), built=built)


def test_kernels_are_the_events_of_a_gpu_that_are_no_copies_in_the_order_in_which_they_began() -> None:
    assert kernels(launched("void at::native::reduce<4>(float*)", "rms_fwd")) == [
        "at::native::reduce<4>(float*)",
        "rms_fwd",
    ]
    assert kernels(launched()) == []


def test_one_kernel_for_all_sizes_is_one_line_and_is_told_only_if_somebody_asks() -> None:
    same = [ran(m, n, launched("rms_fwd"), launched("rms_bwd", "sum")) for m, n in ((3, 64), (300, 2048))]
    assert lines(same) == ["forward: rms_fwd", "backward: rms_bwd + sum"]
    assert changing(same) == []
    assert lines([]) == changing([]) == []


def test_what_depends_on_n_is_told_by_n_with_the_sizes_that_were_seen() -> None:
    small, tiled, huge = launched("rms_small"), launched("rms_tiled", "rms_tiled"), launched("rms_split", "rms_join")
    seen = [ran(3, 9000, huge), ran(3, 64, small), ran(300, 1024, small), ran(3, 2048, tiled), ran(300, 4096, tiled)]
    assert changing(seen) == [
        "forward: N <= 1024: rms_small; 2048 <= N <= 4096: rms_tiled, 2 launches; N >= 9000: rms_split + rms_join"
    ]
    assert changing([ran(3, 64, small), ran(3, 2048, tiled)]) == [
        "forward: N <= 64: rms_small; N >= 2048: rms_tiled, 2 launches"
    ]


def test_what_depends_on_m_is_told_by_m_and_what_depends_on_both_case_by_case() -> None:
    one, two = launched("a"), launched("b")
    by_m = [ran(1, 64, one), ran(300, 64, two), ran(1, 2048, one)]
    assert changing(by_m) == ["forward: M <= 1: a; M >= 300: b"]
    by_both = [ran(1, 64, one), ran(300, 64, two), ran(1, 2048, two), ran(300, 2048, one)]
    assert changing(by_both) == ["forward: M=1 N=64: a; M=300 N=64: b; M=1 N=2048: b; M=300 N=2048: a"]


def test_a_size_that_has_an_end_of_its_own_again_is_told_as_three_ranges() -> None:
    seen = [ran(3, n, launched("odd" if n == 1000 else "even")) for n in (64, 1000, 2048)]
    assert changing(seen) == ["forward: N <= 64: even; N = 1000: odd; N >= 2048: even"]


def test_a_backward_that_launches_nothing_at_some_sizes_says_so() -> None:
    seen = [ran(3, 64, launched("a"), launched("b")), ran(3, 2048, launched("a"))]
    assert changing(seen) == ["backward: N <= 64: b; N >= 2048: no kernel"]


@pytest.mark.parametrize(
    ("built", "told"),
    [((1, 1, 1), True), ((4, 2, 2), True), ((1, 0, 0), False), ((0, 0, 0), False), ((1,), False)],
)
def test_what_is_compiled_for_all_new_m_compiles_for_each(built: tuple[int, ...], told: bool) -> None:
    """The first of them may be of another kind than all before."""
    new = [ran(301 + number, 64, launched("a"), built=count) for number, count in enumerate(built)]
    said = changing([ran(300, 64, launched("a")), *new])
    assert said == [f"compiles for each M: {sum(built)} for 3 new ones (301, 302, 303)"] * told


def test_changes_are_told_of_sizes_that_both_runs_have() -> None:
    before = [ran(3, n, launched("small"), launched("bwd")) for n in (64, 128, 256, 512, 1024)]
    now = [ran(3, n, launched("tiled"), launched("bwd")) for n in (64, 128, 256, 512)] + [ran(4, 1024, launched("x"))]
    assert changes(before, before) == [] and changes([], now) == []
    assert changes(before, now) == ["forward: small -> tiled (M=3 N=64, M=3 N=128, M=3 N=256 and 1 more)"]


def test_a_cell_has_one_line_of_what_changes_and_all_of_it_if_somebody_asks() -> None:
    seen = (ran(3, 64, launched("small"), launched("bwd")), ran(3, 2048, launched("tiled"), launched("bwd")))
    for verbosity, told in ((0, ["forward"]), (1, ["forward", "backward"])):
        out = StringIO()
        terminal.render(run(verdict(ran=seen)), terminal.console_for(out), verbosity=verbosity)
        said = [line.strip() for line in out.getvalue().splitlines() if "ward: " in line]
        assert [line.partition(":")[0] for line in said] == told
        assert said[0] == "forward: N <= 64: small; N >= 2048: tiled"


def test_names_are_data_from_outside() -> None:
    said = changing([ran(3, 64, launched("a\x1b[31m\nb")), ran(3, 128, launched("c"))])
    assert len(said) == 1 and "\x1b" not in said[0] and "\n" not in said[0]
