"""Simulated kernels: what each builds for a case, how the machine stalls, and the cases that it is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from normcheck.cases.case import Case, with_rows
from normcheck.cases.depth import Depth
from normcheck.cases.layouts import STRIDED
from normcheck.cases.ops import OPS
from normcheck.cases.planned import Planned
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan, Profile, planner_of
from normcheck.impls.implementation import Implementation
from normcheck.planner.own import RUNS
from normcheck.planner.planner import Planner

Builds = Callable[[Case], Iterator[tuple[Hashable, float]]]
"""What a kernel builds for a case: a key, which is built once, and its seconds."""

CALL_SECONDS, STARTING_SECONDS, FIRST_SECONDS = 0.006, 2.0, 2.0

DECLARED = ((2, 16), (3, 7), (1, 24), (33, 127), (17, 1000), (2, 4097), (64, 768), (3, 8200), (4096, 128), (2, 65536))


def plain(case: Case) -> Iterator[tuple[Hashable, float]]:
    """Nothing is built."""
    return iter(())


def blocks(case: Case) -> Iterator[tuple[Hashable, float]]:
    """Triton: a block of a power of two, divisibility by 16, alignment, what is there and of which dtype."""
    aligned = case.layout != "misaligned", (case.N + case.gap) % 16 == 0, case.M == 1, case.N == 1
    parameters = case.weight, case.bias, case.weight_dtype, case.residual_dtype
    yield ("both", max(1 << (case.N - 1).bit_length(), 8), aligned, parameters), 0.7


def at(price: float, *, each_height: bool) -> Builds:
    """A first call takes so long, with each of a case's parameters: at each M and N, or at each N."""

    def builds(case: Case) -> Iterator[tuple[Hashable, float]]:
        yield (case.N, case.M if each_height else 0, case.bias, case.weight_dtype), price

    return builds


plans, slow_plans, tuned = at(0.58, each_height=True), at(1.6, each_height=True), at(2.0, each_height=False)
"""cuDNN: a plan for each shape; the same on a busy machine; ten configurations for each N."""


def tuned_by_triton(case: Case) -> Iterator[tuple[Hashable, float]]:
    """As Triton's autotuner does it: for each N and dtype, without rows as well; then one of them for other strides."""
    yield (case.N, case.weight_dtype), 2.9
    yield (case.N, case.weight_dtype, (case.N + case.gap) % 16 == 0, case.layout == "misaligned"), 0.15


def tuned_by_width(case: Case) -> Iterator[tuple[Hashable, float]]:
    """Ten to ninety configurations for each N: the wider, the longer."""
    yield (case.N, case.weight_dtype), 0.3 + case.N / 1000


def tuned_for_a_minute(case: Case) -> Iterator[tuple[Hashable, float]]:
    """At each N."""
    yield case.N, 60.0


def compiled(case: Case) -> Iterator[tuple[Hashable, float]]:
    """torch.compile with dynamic shapes: a size of 1 is a constant."""
    yield (case.bias, case.weight_dtype, case.M == 1, case.N == 1), 7.0


def each_shape(case: Case) -> Iterator[tuple[Hashable, float]]:
    """torch.compile with static shapes."""
    yield (case.M, case.N, case.bias, case.weight_dtype, case.layout in STRIDED), 6.0


def compiled_by_user(case: Case) -> Iterator[tuple[Hashable, float]]:
    """Plain torch.compile: static, then dynamic N, then M = 1; and each new eps, for the first one C++ as well."""
    yield ("shape", case.bias, case.weight_dtype, case.M == 1), 1.5
    yield "dynamic", 1.5
    if case.eps != 1e-5:
        yield "C++", 32.0
        yield ("eps", case.eps), 1.5


def compiled_at_first_slowly(case: Case) -> Iterator[tuple[Hashable, float]]:
    """As it was on an H200's host: the first new eps took a minute, and each layout, eps and parameter 0.8 s."""
    yield ("shape", case.bias, case.weight_dtype, case.M == 1, case.layout), 0.8
    yield "dynamic", 1.4
    if case.eps != 1e-5:
        yield "C++", 57.0
        yield ("eps", case.eps), 0.7


def tuned_at_first_slowly(case: Case) -> Iterator[tuple[Hashable, float]]:
    """As it was beside fifteen other cells: 22 configurations of one block, then a launch for each layout and eps."""
    yield "tuned", 62.0
    yield (case.layout, case.bias, case.weight_dtype, case.M == 1), 1.1
    yield ("eps", case.eps), 1.1
    yield max(1 << (case.N - 1).bit_length(), 8), 1.1


def eps_in_the_key(case: Case) -> Iterator[tuple[Hashable, float]]:
    """The same at its worst."""
    yield (case.bias, case.weight_dtype, case.M == 1, case.eps), 1.5
    yield "dynamic", 1.5
    if case.eps != 1e-5:
        yield "C++", 45.0


def compiled_on_cpu(case: Case) -> Iterator[tuple[Hashable, float]]:
    """torch.compile on a CPU, where each variant is C++."""
    yield (case.bias, case.weight_dtype, case.M == 1, case.N == 1, case.layout in STRIDED), 8.0


def for_each_m(case: Case) -> Iterator[tuple[Hashable, float]]:
    """A JIT that takes M for a constant."""
    yield (case.M, case.bias, case.weight_dtype), 1.2


def for_layouts(case: Case) -> Iterator[tuple[Hashable, float]]:
    """A copy kernel for each layout, and nothing for sizes."""
    yield (case.layout, case.bias), 2.5


def loaded_once(case: Case) -> Iterator[tuple[Hashable, float]]:
    """load_inline: nvcc, once a process."""
    yield "nvcc", 48.0


@dataclass
class Simulated:
    """The cases that a kernel was given; ``seconds``: of all of them; ``refused``: how many it refused."""

    cell: Cell
    core: Planner
    seconds: float = STARTING_SECONDS
    planned: list[Planned] = field(default_factory=list)
    refused: int = 0
    was_priced: bool = False

    @property
    def cases(self) -> list[Case]:
        return [planned.case for planned in self.planned]

    @property
    def missed(self) -> tuple[str, ...]:
        return self.core.account.coverage(len(self.planned)).missed


def simulated(
    builds: Builds,
    /,
    *,
    device: str = "cuda",
    op: str = "rmsnorm",
    seed: int = 0,
    refuses: Callable[[Case], bool] = lambda case: False,
    stalls: float = 0.0,
    pauses: tuple[int, ...] = (),
    cells: int = 1,
    call: float = CALL_SECONDS,
    starting: float = STARTING_SECONDS,
    row: float = 0.0,
    without_rows: bool = False,
    profile: Profile = PROFILES["quick"],
    **fields: Any,
) -> Simulated:
    """The core of a profile, in the order and to the end that these costs give it.

    ``stalls``: the share of cases in which the machine stands still for half a second to eight; ``pauses``: the numbers
    of cases in which it does so for three. ``cells``: how many follow each other in the run. ``call``, ``row``: seconds
    of a call, and of a row beside it. ``without_rows``: whether a case without rows builds something as well.
    """
    implementation = Implementation(name="mine", op=op, forward=lambda *tensors, **numbers: None, **fields)
    cell = Cell(OPS[op], implementation, "bf16", "tests")
    profile = replace(profile, dear=profile.dear.in_turn(cells))
    run = Simulated(cell, planner_of(cell, Plan((cell,), profile, seed, device, 120.0), starting), starting)
    built, chance = set[Hashable](), random.Random(f"{seed} stalls")
    while (step := run.core.next()) is not None:
        case = step.planned.case
        if refuses(case):
            run.refused += 1
            run.core.saw(step, refused=True, seconds=0.001)
            continue
        seconds = (call + row * case.M) * RUNS[step.planned.probe]
        seconds += FIRST_SECONDS * (not run.planned) + 3.0 * (len(run.planned) in pauses)
        for one in (case, with_rows(case, 1)) if step.planned.probe == Depth.ROWS else (case,):
            for key, price in builds(one) if one.M or without_rows else ():
                seconds += price * (key not in built)
                built.add(key)
        if chance.random() < stalls:
            seconds += chance.uniform(0.5, 8.0)
        run.core.saw(step, refused=False, seconds=seconds)
        run.seconds += seconds
        run.planned.append(step.planned)
        run.was_priced |= run.core.is_priced
    return run
