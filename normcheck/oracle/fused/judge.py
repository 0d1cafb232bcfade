"""The fused judge: what the plain judge finds of a case in which nothing is wrong, by a few launches.

It passes a case or leaves it: ``forward`` and ``gradients`` find what the plain judge would, or None if anything is
wrong, unbounded or not finite. The plain judge then judges the case, with all details.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import format_of
from normcheck.cases.ops import Op
from normcheck.oracle import casting, rounding
from normcheck.oracle.compare import Comparison
from normcheck.oracle.judge import END_TO_END, GIVEN_OWN, GIVEN_REFERENCE, Checked, Judge, Reference
from normcheck.oracle.rounding import FLT_MAX, Rules
from normcheck.oracle.tolerances import Model


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the kernels are launched: tiles of ``rows`` x ``columns`` by so many ``warps``, on ``each`` multiprocessor.

    ``sum_rows``, ``sum_columns``, ``sums_each``: the same for the sums over rows. ``specialised``: compiled for sizes,
    strides and addresses that are multiples of 16. ``registers``: at most so many a thread.
    """

    rows: int
    columns: int
    warps: int
    each: int
    sum_rows: int
    sum_columns: int
    sums_each: int
    specialised: bool
    registers: int | None = None

    def tile(self, N: int) -> dict[str, int | bool | None]:
        """The tile of rows of N elements, as constants of a kernel."""
        constants: dict[str, int | bool | None] = {"WHOLE": self.specialised and self.columns >= N}
        return constants | {"R": self.rows, "B": self.columns, "num_warps": self.warps, "maxnreg": self.registers}


SMALL = Way(
    rows=1, columns=512, warps=4, each=8, sum_rows=4, sum_columns=128, sums_each=8, specialised=False
)  # fmt: skip
"""Every small or odd case goes this way, so that a process compiles each kernel once."""

LARGE_FORWARD = Way(
    rows=1, columns=128, warps=1, each=32, registers=112, sum_rows=4, sum_columns=128, sums_each=16, specialised=True
)  # fmt: skip
LARGE_GIVEN = replace(LARGE_FORWARD, rows=2, registers=None)
LARGE_GRADIENTS = replace(LARGE_FORWARD, columns=256, registers=None)
"""The fastest of some 50 on an H200."""

_LARGE_ELEMENTS = 1 << 20
_ALIGNED = 16
_GROUPS_AT_ONCE, _VECTOR_COLUMNS, _SUM_WARPS = 16, 32, 4
_MOST_GROUPS = 64
_GROUP_ROWS = 32
"""At least so many rows share their sums, which are then a small part of the data."""


def suits(judge: Judge) -> bool:
    """Whether the fused judge can judge this case: every bound is finite, and nobody watches what is compared."""
    case = judge.case
    return (
        judge.finite
        and case.M > 0
        and case.rows not in (*NOT_FINITE, "largest")
        and judge.watch is None
        and judge.rules.safety == 1.0
        and judge.rules.model.accumulate == "fp32"
    )


Finish = Callable[[], tuple[Checked, ...] | None]
"""Waits for a judgement that was begun: what the plain judge would return, if everything passes; else None."""


def forward(judge: Judge, outputs: Mapping[str, Tensor]) -> tuple[Finish, Reference]:
    """Begin what ``judge_forward`` does. The reference can be used at once."""
    from normcheck.oracle.fused import forward as kernel

    op, case, model, device = judge.op, judge.case, judge.rules.model, judge.x.device
    M, N = case.M, case.N
    y = _with_rows(outputs["y"], M, N)
    y_fmt = format_of(y.dtype)
    own = {name: outputs[name].detach().reshape(M).contiguous() for name in op.statistics if name in outputs}
    own_bits = None
    if "bitmask" in outputs:
        own_bits = outputs["bitmask"].detach().reshape(M, -1).view(torch.uint8).contiguous()
    given_own = len(own) == len(op.statistics) and model.y_given_stats
    rows = torch.empty((8, M), dtype=torch.float64, device=device)
    mean = torch.empty((M, 1), dtype=torch.float32, device=device) if op.centered else None
    rstd = torch.empty((M, 1), dtype=torch.float32, device=device)
    bits, ties, doubt = (torch.empty((M, N), dtype=torch.bool, device=device) if op.clamped else None for _ in range(3))
    arguments = (
        judge.x, y, judge.scale.g, judge.bias, own.get("mean"), own.get("rstd"), own_bits, _numbers(judge, y_fmt),
        rows, mean, rstd, *(None if mask is None else mask.view(torch.uint8) for mask in (bits, ties, doubt)),
        M, N, judge.x.stride(0), y.stride(0), 0 if own_bits is None else own_bits.stride(0),
    )  # fmt: skip
    way = _way(judge, (*arguments[:-5], *arguments[-4:]), LARGE_FORWARD)  # M need not be aligned
    facts = {
        "CENTERED": op.centered,
        "ANY_VARIANCE": op.centered and judge.rules.c_var != 0,
        "FOLDED": model.y_form == "folded",
        "CAST": casting.casts(op, judge.rules, judge.io),
        "CLAMPED": op.clamped,
        "OWN": given_own,
        "PACKED": "bitmask" in outputs and outputs["bitmask"].dtype != torch.bool,
        "ROUNDED": model.bitmask_compare != "fp32",
        "STORED": _stored(judge.rules, y_fmt),
        "FLUSH": _flushed(judge.rules, y_fmt),
        "SOME_ZERO": not way.specialised or judge.scale.where is not None,
    }
    single = FORMATS["fp32"]
    checks = [
        _Check("mean", END_TO_END, M, single, "mean" in own),
        _Check("rstd", END_TO_END, M, single, "rstd" in own),
        _Check("y", GIVEN_OWN, M * N, y_fmt, given_own),
        _Check("y", END_TO_END, M * N, y_fmt, True),
    ]

    def begin(details: bool) -> Tensor:
        found = torch.zeros(kernel.FOUND, dtype=torch.int64, device=device)
        grid = (_programs(M, way, device),)
        _launch(kernel.forward_kernel, way, grid, found, *arguments, **facts, **way.tile(N), DETAILS=details)
        return found

    def read(seen: Sequence[int]) -> tuple[Checked, ...] | None:
        checked = _checked(checks, seen, zeros=judge.zeros)
        if checked is None or seen[kernel.UNCHECKABLE_ROWS.value] or seen[kernel.WRONG_BITS.value]:
            return None
        if own_bits is None:
            return checked
        zeros = seen[kernel.ZERO_BITS.value] if judge.zeros else None
        return (
            *checked,
            Checked("bitmask", END_TO_END, Comparison(0.0, M * N, seen[kernel.DOUBTFUL_BITS.value], zeros)),
        )

    return _finish(judge, way, begin, read), Reference(mean, rstd, bits, ties, doubt, rows)


def gradients(
    judge: Judge, returned: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> Finish:
    """Begin what ``judge_gradients`` does. ``saved``: of ``forward``."""
    from normcheck.oracle.fused import gradients as kernel

    assert saved.rows is not None
    op, case, rules, device = judge.op, judge.case, judge.rules, judge.x.device
    M, N = case.M, case.N
    numbers = _numbers(judge, judge.io)
    bits = None if saved.bits is None else saved.bits.view(torch.uint8)
    doubt = saved.doubt.view(torch.uint8) if own_bits and saved.doubt is not None else None
    rows = saved.rows[4:] if given else saved.rows[:4]
    x, dy, across_dy = judge.x, judge.dy, judge.dy.stride(1) if N > 1 else 1
    dx = _with_rows(returned["dx"], M, N) if "dx" in returned else None
    vectors = {name: returned[name].detach().reshape(N).contiguous() for name in ("dw", "db") if name in returned}
    sizes = (x, dy, dx, N, x.stride(0), dy.stride(0), 0 if dx is None else dx.stride(0))
    way = _way(judge, sizes, LARGE_GIVEN if given else LARGE_GRADIENTS)
    facts = {
        "GIVEN": given and way.specialised,
        "CENTERED": op.centered,
        "RAW": rules.model.bwd_form == "raw",
        "IO_ROUNDED": casting.casts(op, rules, judge.io),
        "FLUSH": _flushed(rules, judge.io),
    }
    check = GIVEN_REFERENCE if given else END_TO_END
    checks = [
        _Check("dx", check, M * N, judge.io, dx is not None),
        _Check("dw", check, N, judge.weight, "dw" in vectors),
        _Check("db", check, N, judge.weight, "db" in vectors),
    ]

    def begin(details: bool) -> Tensor:
        found = torch.zeros(kernel.FOUND, dtype=torch.int64, device=device)
        if dx is not None:
            _launch(
                kernel.dx_kernel, way, (_programs(M, way, device),),
                found, x, dy, dx, judge.scale.g, bits, doubt, rows, numbers,
                M, N, x.stride(0), dy.stride(0), across_dy, dx.stride(0), **facts,
                STORED=_stored(rules, judge.io), **way.tile(N), DETAILS=details,
            )  # fmt: skip
        if vectors:
            across = -(-N // way.sum_columns)
            most = max(1, _multiprocessors(device) * way.sums_each // across)
            group_rows = max(-(-M // min(most, _MOST_GROUPS)), _GROUP_ROWS)
            group_rows = -(-group_rows // way.sum_rows) * way.sum_rows
            groups = -(-M // group_rows)
            sums = torch.empty((groups, kernel.SUMS, N), dtype=torch.float64, device=device)
            _launch(
                kernel.sums_kernel, way, (groups, across),
                x, dy, bits, doubt, rows, numbers, sums, M, N, group_rows, x.stride(0), dy.stride(0), across_dy,
                **facts, R=way.sum_rows, B=way.sum_columns, num_warps=_SUM_WARPS,
            )  # fmt: skip
            _launch(
                kernel.dw_db_kernel, way, (-(-N // _VECTOR_COLUMNS),),
                found, vectors.get("dw"), vectors.get("db"), sums, numbers, groups, N,
                STORED=_stored(rules, judge.weight), FLUSH=_flushed(rules, judge.weight), G=_GROUPS_AT_ONCE,
                B=_VECTOR_COLUMNS, num_warps=_SUM_WARPS,
            )  # fmt: skip
        return found

    return _finish(judge, way, begin, lambda seen: _checked(checks, seen, zeros=judge.zeros))


def _finish(
    judge: Judge,
    way: Way,
    begin: Callable[[bool], Tensor],
    read: Callable[[Sequence[int]], tuple[Checked, ...] | None],
) -> Finish:
    """Begin a judgement now. A large one first finds ratios alone, and its details only if a ratio is a record."""
    detailed = judge.zeros or not way.specialised
    found = begin(detailed)

    def finish() -> tuple[Checked, ...] | None:
        checked = read(found.tolist())
        if detailed or checked is None:
            return checked
        record = any(c.comparison.ratio > judge.floors.get(c.output, 0.0) for c in checked)
        return read(begin(True).tolist()) if record else checked

    return finish


@dataclass(frozen=True, slots=True)
class _Check:
    """A check that a kernel makes of an output of ``numel`` elements in ``fmt``, if the case has it."""

    output: str
    name: str
    numel: int
    fmt: Format
    made: bool


def _checked(checks: Sequence[_Check], seen: Sequence[int], *, zeros: bool) -> tuple[Checked, ...] | None:
    """What ``checks`` have found, see ``formulas.FIELDS``; None if one of them fails."""
    from normcheck.oracle.fused.formulas import FIELDS

    made = []
    for number, check in enumerate(checks):
        if check.made:
            best, size, in_powers, count = seen[FIELDS.value * number :][: FIELDS.value]
            ratio, max_abs, powers = struct.unpack("<3d", struct.pack("<3q", best, size, in_powers))
            max_ulp = powers * 2.0 ** (check.fmt.p - 1)
            comparison = Comparison(ratio, check.numel, 0, count if zeros else None, max_abs, max_ulp)
            made.append(Checked(check.output, check.name, comparison))
    return tuple(made) if all(c.comparison.ratio <= 1 for c in made) else None


def _with_rows(tensor: Tensor, M: int, N: int) -> Tensor:
    """``tensor`` as (M, N) with a last stride of 1."""
    rows = tensor.detach().reshape(M, N)
    return rows if N == 1 or rows.stride(1) == 1 else rows.contiguous()


def _way(judge: Judge, arguments: Sequence[Tensor | int | None], large: Way) -> Way:
    """``large`` for a large case in which every size, stride and address among the ``arguments`` is aligned."""
    if judge.case.M * judge.case.N < _LARGE_ELEMENTS or judge.case.N % _ALIGNED:
        return SMALL
    numbers = (a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments)
    return large if all(number % _ALIGNED == 0 for number in numbers) else SMALL


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _programs(M: int, way: Way, device: torch.device) -> int:
    return min(-(-M // way.rows), _multiprocessors(device) * way.each)


compiling_seconds = 0.0
"""For which launches of the main thread have waited, see ``judging.compiling_seconds``."""

_known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
"""What the compilation of a launch depends on -> the compilation, and the kernel's constants as arguments."""


def _launch(kernel: Any, way: Way, grid: tuple[int, ...], *arguments: Tensor | int | None, **constants: Any) -> None:
    """Launch a kernel; one that was launched like this before without asking Triton, which takes 40 us to look."""
    on_gpu = arguments[0].is_cuda if isinstance(arguments[0], Tensor) else False
    key = (kernel.fn, way.specialised, *constants.values(), *map(_fact, arguments))
    known = _known.get(key) if on_gpu else None
    if known is not None:
        compiled, last = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *last)
        return
    begun = time.perf_counter()
    compiled = _compiled(kernel, way.specialised)[grid](*arguments, **constants)
    if threading.current_thread() is threading.main_thread():
        _note_compiling(time.perf_counter() - begun)
    if on_gpu:
        _known[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _note_compiling(seconds: float) -> None:
    global compiling_seconds
    compiling_seconds += seconds


def _fact(argument: Tensor | int | None) -> Hashable:
    """What a compilation depends on, if all or no addresses are aligned: a dtype, or whether an integer is wide."""
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument if argument is None or argument in (0, 1) else argument.bit_length() > 31


@cache
def _compiled(kernel: Any, specialised: bool) -> Any:
    """``kernel``; one that is not ``specialised`` is compiled once for all sizes, strides and addresses."""
    import triton

    sizes = [name for name in kernel.arg_names if name in _SIZES]
    if specialised:
        return triton.jit(kernel.fn, do_not_specialize=[name for name in sizes if name in _COUNTS])
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    return triton.jit(kernel.fn, do_not_specialize=sizes, do_not_specialize_on_alignment=pointers)


_COUNTS = ("M", "group_rows", "groups")
_SIZES = (*_COUNTS, "N", "x_stride", "y_stride", "bits_stride", "dy_stride", "dy_column", "dx_stride")


def _stored(rules: Rules, fmt: Format) -> bool:
    """Whether a store in ``fmt`` rounds; the accumulation format's rounding is among those before the store."""
    return fmt.name != rules.model.accumulate


def _flushed(rules: Rules, fmt: Format) -> bool:
    """Whether a subnormal number may be flushed at a store in ``fmt``, see ``rounding.store``."""
    return _stored(rules, fmt) and rules.model.ftz and fmt.emin == FORMATS["fp32"].emin


def _numbers(judge: Judge, y_fmt: Format) -> Tensor:
    return _numbers_of(judge.op, judge.rules.model, _sized(judge.case), y_fmt, judge.x.device)


def _sized(case: Case) -> Case:
    """The case with what its numbers depend on, and nothing else, so that cases share their numbers."""
    return Case(
        op=case.op,
        dtype=case.dtype,
        M=case.M,
        N=case.N,
        eps=case.eps,
        weight_dtype=case.weight_dtype,
        options=case.options,
    )


@lru_cache(maxsize=256)
def _numbers_of(op: Op, model: Model, case: Case, y_fmt: Format, device: torch.device) -> Tensor:
    """``formulas.NUMBERS`` of a case, fp64 on ``device``."""
    from normcheck.oracle.fused.formulas import NUMBERS

    rules = rounding.rules(op, model)
    u, eta, count, gam = rules.u, rules.eta, rules.count, rules.gam
    io, weight, single = FORMATS[case.dtype], FORMATS[case.weight_format], FORMATS["fp32"]
    h, down, both = rules.chain(case.N), rules.chain(case.M), rules.chain(max(case.M, case.N))
    clips = case.option_values
    values = {
        "u": u,
        "eta": eta,
        "eps": case.eps,
        "gam_mean": gam(h + count["mean"]),
        "mean_eta": (h + 3) * eta,
        "gam_var": gam(h + count["var" if op.centered else "rms"]),
        "c_var": rules.c_var * gam(h),
        "rs": 2 * model.rsqrt_ulp * u,
        "limit": FLT_MAX / 4 / case.N,
        "k_y": rules.k_y,
        "al_saved": count["stats_saved"] * u,
        "lower_clip": clips.get("lower_clip", 0.0),
        "upper_clip": clips.get("upper_clip", 0.0),
        "y_least": 2.0**y_fmt.emin,
        "y_half": 2.0**-y_fmt.p * rules.store["y"],
        "per_xhat": 1 + count["xhat"] * u,
        "io_least": 2.0**io.emin,
        "io_half": 2.0**-io.p,
        "gam_c1": gam(h + count["c1"]),
        "gam_c2": gam(h + count["c2"]),
        "k_dx": count["dx_elementwise"] * u,
        "gam_raw": gam(h + 8),
        "grow": 1 + gam(both + 16),
        "mean_xh": 1.01,
        "dx_half": 2.0**-io.p * rules.store["dx"],
        "dw_io_half": 2.0**-io.p * rules.store["dw"],
        "w_least": 2.0**weight.emin,
        "dw_half": 2.0**-weight.p * rules.store["dw"],
        "db_half": 2.0**-weight.p * rules.store["db"],
        "gam_dw": gam(down + count["dw"]),
        "gam_db": gam(down + count["db"]),
        "rows_eta": 2 * case.M * eta,
        "least_32": 2.0**single.emin,
    }
    return torch.tensor([values[name] for name in NUMBERS], dtype=torch.float64, device=device)
