"""The fused judge: what the plain judge finds of a case in which nothing is wrong, by a few launches.

It passes a case or leaves it: ``forward`` and ``gradients`` find what the plain judge would, or None if anything is
wrong, unbounded or not finite. The plain judge then judges the case, with all details.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import format_of
from normcheck.cases.layouts import OF_ROW_GROUPS
from normcheck.cases.op import Op
from normcheck.oracle import casting, rounding
from normcheck.oracle.compare import Comparison
from normcheck.oracle.fused import layout, on_cpu
from normcheck.oracle.fused.kept import Found, Kept, Seen, Sums
from normcheck.oracle.fused.launch import Way, multiprocessors, programs
from normcheck.oracle.fused.launch import launch as on_gpu
from normcheck.oracle.judge import END_TO_END, GIVEN_OWN, GIVEN_REFERENCE, Checked, Judge, Reference
from normcheck.oracle.rounding import FLT_MAX, Rules
from normcheck.oracle.tolerances import Model

SMALL = Way(
    rows=1, columns=512, warps=4, each=8, sum_rows=4, sum_columns=128, sums_each=8, specialised=False
)  # fmt: skip
"""Every small or odd case goes this way, so that a process compiles each kernel once."""

LARGE_FORWARD = Way(
    rows=1, columns=128, warps=1, each=16, registers=128, stages=4, sum_rows=1, sum_columns=512, sums_each=8,
    sum_groups=198, sum_stages=4, specialised=True,
)  # fmt: skip
LARGE_GRADIENTS = replace(LARGE_FORWARD, columns=256)
"""The fastest of some 90 on an H200: as many programs as fit, which read ahead, since waits for memory cost most."""

LARGE_CLAMPED = replace(LARGE_FORWARD, columns=64, each=20, registers=96, stages=1)
"""For the forward of an op that clamps, which has no registers left to read ahead: so more programs wait, for less."""

LARGE_ROUNDED = replace(LARGE_GRADIENTS, stages=5, sum_groups=132, sum_stages=3)
"""For an op that rounds xhat, whose sums take more registers: so fewer programs fit."""

_LARGE_ELEMENTS = 1 << 20
_ALIGNED = 16
_GROUPS_AT_ONCE, _VECTOR_COLUMNS, _SUM_WARPS = 64, 8, 4
_GROUP_ROWS = 32
"""At least so many rows share their sums, which are then a small part of the data."""


def suits(judge: Judge) -> bool:
    """Whether the fused judge can judge this case: x has one row stride, all rows one weight, the op gets no more
    inputs by name and norms a mean, nobody watches what is compared, and on a GPU every bound is finite.
    """
    case = judge.case
    on_gpu = judge.x.is_cuda or launcher(judge.x.device) is not on_cpu.launch
    finite = case.rows not in (*NOT_FINITE, "largest") and case.dy not in NOT_FINITE
    return (
        judge.bounded
        and (finite or not on_gpu)
        and judge.x.dim() == 2
        and case.layout not in OF_ROW_GROUPS
        and case.M > 0
        and judge.watch is None
        and judge.rules.safety == 1.0
        and judge.rules.model.accumulate == "fp32"
        and not judge.op.by_name
        and not judge.op.l2
        and not judge.op.grouped
        and not judge.op.rotary
    )


def launcher(device: torch.device) -> Callable[..., None]:
    """What calls a kernel by its name: one of Triton on a GPU, of C on a CPU."""
    return on_gpu if device.type == "cuda" else on_cpu.launch


Finish = Callable[[], tuple[Checked, ...] | None]
"""Waits for a judgement that was begun: what the plain judge would return, if everything passes; else None."""


def forward(judge: Judge, outputs: Mapping[str, Tensor]) -> tuple[Finish, Reference]:
    """Begin what ``judge_forward`` does. The reference can be used at once."""
    op, case, model, device = judge.op, judge.case, judge.rules.model, judge.x.device
    M, N, launch = case.M, case.N, launcher(device)
    y = _with_rows(outputs["y"], M, N)
    y_fmt = format_of(y.dtype)
    own = {name: outputs[name].contiguous() for name in op.statistics if name in outputs}
    own_bits = None
    if "bitmask" in outputs:
        own_bits = outputs["bitmask"].reshape(M, -1).view(torch.uint8).contiguous()
    given_own = len(own) == len(op.statistics) and model.y_given_stats
    found = Found.room_for(layout.OF_FORWARD + 2 * layout.OF_GRADIENTS, device)
    numbers = _numbers(judge, y_fmt)
    rows = torch.empty((8, M), dtype=torch.float64, device=device)
    mean = torch.empty((M, 1), dtype=torch.float32, device=device) if op.centered else None
    rstd = torch.empty((M, 1), dtype=torch.float32, device=device)
    bits, ties, doubt = (torch.empty((M, N), dtype=torch.bool, device=device) if op.clamped else None for _ in range(3))
    arguments = (
        judge.x, y, judge.scale.weight, judge.stored_bias, own.get("mean"), own.get("rstd"), own_bits,
        numbers, rows, mean, rstd,
        *(None if mask is None else mask.view(torch.uint8) for mask in (bits, ties, doubt)),
        M, N, judge.x.stride(0), y.stride(0), 0 if own_bits is None else own_bits.stride(0),
    )  # fmt: skip
    large = LARGE_CLAMPED if op.clamped else LARGE_FORWARD
    way = _way(judge, (*arguments[:-5], *arguments[-4:]), large)  # M need not be aligned
    facts = {
        "weight_offset": op.weight_offset,
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
    }

    def begin(into: Tensor, details: bool) -> None:
        grid = (programs(M, way, device),)
        launch("forward_kernel", way, grid, into, *arguments, **facts, **way.tile(M, N), DETAILS=details)

    def read(seen: Seen) -> tuple[Checked, ...] | None:
        single = FORMATS["fp32"]
        checks = (
            _Check("mean", END_TO_END, M, single, "mean" in own),
            _Check("rstd", END_TO_END, M, single, "rstd" in own),
            _Check("y", GIVEN_OWN, M * N, y_fmt, given_own),
            _Check("y", END_TO_END, M * N, y_fmt, True),
        )
        checked, counts = _checked(checks, seen, zeros=judge.zeros), seen.counts
        if checked is None or counts[layout.UNCHECKABLE_ROWS] or counts[layout.WRONG_BITS]:
            return None
        if own_bits is None:
            return checked
        zeros = counts[layout.ZERO_BITS] if judge.zeros else None
        return (
            *checked,
            Checked("bitmask", END_TO_END, Comparison(0.0, M * N, counts[layout.DOUBTFUL_BITS], zeros)),
        )

    kept = Kept(rows, found, numbers, both=len(own) == len(op.statistics))
    return _finish(judge, way, found, layout.OF_FORWARD, begin, read), Reference(mean, rstd, bits, ties, doubt, kept)


def gradients(
    judge: Judge, returned: Mapping[str, Tensor], saved: Reference, *, given: bool, own_bits: bool = False
) -> Finish:
    """Begin what ``judge_gradients`` does. ``saved``: of ``forward``."""
    kept, launch = saved.kept, launcher(judge.x.device)
    assert isinstance(kept, Kept)
    op, case, rules, device = judge.op, judge.case, judge.rules, judge.x.device
    M, N = case.M, case.N
    numbers = kept.numbers  # the format of y, on which two of them depend, is the forward's alone
    bits = None if saved.bits is None else saved.bits.view(torch.uint8)
    in_doubt = saved.doubt if own_bits else None
    doubt = None if in_doubt is None else in_doubt.view(torch.uint8)
    rows = kept.rows[4:] if given else kept.rows
    x, dy, across_dy = judge.x, judge.dy, judge.dy.stride(1) if N > 1 else 1
    dx = _with_rows(returned["dx"], M, N) if "dx" in returned else None
    vectors = {name: returned[name].contiguous() for name in ("dw", "db") if name in returned}
    sizes = (x, dy, dx, judge.scale.weight, N, x.stride(0), dy.stride(0), 0 if dx is None else dx.stride(0))
    way = _way(judge, sizes, LARGE_ROUNDED if casting.casts(op, rules, judge.io) else LARGE_GRADIENTS)
    facts = {
        "RAW": rules.model.bwd_form == "raw",
        "IO_ROUNDED": casting.casts(op, rules, judge.io),
        "FLUSH": _flushed(rules, judge.io),
    }

    def begin(into: Tensor, details: bool) -> None:
        if dx is not None:
            launch(
                "dx_kernel", way, (programs(M, way, device),),
                into, x, dy, dx, judge.scale.weight, bits, doubt, rows, numbers,
                M, N, x.stride(0), dy.stride(0), across_dy, dx.stride(0), **facts,
                weight_offset=op.weight_offset, GIVEN=given and way.specialised, CENTERED=op.centered,
                STORED=_stored(rules, judge.io), **way.tile(M, N), DETAILS=details,
            )  # fmt: skip
        if vectors:
            sums = next((s for s in kept.sums if s.are_for(saved.bits, in_doubt, given=given)), None) or add_up()
            launch(
                "dw_db_kernel", way, (-(-N // _VECTOR_COLUMNS),),
                into, vectors.get("dw"), vectors.get("db"), sums.values, numbers, sums.values.shape[0], N,
                GIVEN=given, BOTH=sums.both, STORED=_stored(rules, judge.weight), FLUSH=_flushed(rules, judge.weight),
                G=_GROUPS_AT_ONCE, B=_VECTOR_COLUMNS, num_warps=_SUM_WARPS,
            )  # fmt: skip

    def add_up() -> Sums:
        both = kept.both or given
        across = -(-N // way.sum_columns)
        most = max(1, multiprocessors(device) * way.sums_each // across)
        group_rows = max(-(-M // min(most, way.sum_groups)), _GROUP_ROWS)
        group_rows = -(-group_rows // way.sum_rows) * way.sum_rows
        groups = -(-M // group_rows)
        number = layout.BOTH_SUMS if both else layout.WHOLE_SUMS
        values = torch.empty((groups, number, N), dtype=torch.float64, device=device)
        launch(
            "sums_kernel", way, (groups, across),
            x, dy, bits, doubt, kept.rows, numbers, values, M, N, group_rows, x.stride(0), dy.stride(0), across_dy,
            **facts, BOTH=both, STAGES=way.sum_stages, R=way.sum_rows, B=way.sum_columns, num_warps=_SUM_WARPS,
        )  # fmt: skip
        kept.sums.append(Sums(values, saved.bits, in_doubt, both))
        return kept.sums[-1]

    def read(seen: Seen) -> tuple[Checked, ...] | None:
        check = GIVEN_REFERENCE if given else END_TO_END
        checks = (
            _Check("dx", check, M * N, judge.io, dx is not None),
            _Check("dw", check, N, judge.weight, "dw" in vectors),
            _Check("db", check, N, judge.weight, "db" in vectors),
        )
        return _checked(checks, seen, zeros=judge.zeros)

    return _finish(judge, way, kept.found, layout.OF_GRADIENTS, begin, read)


def _finish(
    judge: Judge,
    way: Way,
    found: Found,
    number: int,
    begin: Callable[[Tensor, bool], None],
    read: Callable[[Seen], tuple[Checked, ...] | None],
) -> Finish:
    """Begin a judgement now, which finds so many numbers. A large one first finds ratios alone, and its details only
    if a ratio is a record. ``read`` is called once the GPU is at work: what only it needs is made there.
    """
    detailed = judge.zeros or not way.specialised
    if not found.has_room(number):
        found = Found.room_for(number, judge.x.device)
    place = found.next(number)
    begin(found.numbers[place], detailed)

    def finish() -> tuple[Checked, ...] | None:
        checked = read(found.seen(place))
        if detailed or checked is None:
            return checked
        if all(c.comparison.ratio <= judge.floors.get(c.output, 0.0) for c in checked):
            return checked
        again = Found.room_for(number, judge.x.device)
        begin(again.numbers, True)
        return read(again.seen(slice(number)))

    return finish


@dataclass(frozen=True, slots=True)
class _Check:
    """A check that a kernel makes of an output of ``numel`` elements in ``fmt``, if the case has it."""

    output: str
    name: str
    numel: int
    fmt: Format
    made: bool


def _checked(checks: Sequence[_Check], seen: Seen, *, zeros: bool) -> tuple[Checked, ...] | None:
    """What ``checks`` have found, see ``layout.FIELDS``; None if one of them fails."""
    made = []
    for number, check in enumerate(checks):
        if check.made:
            at = layout.FIELDS * number
            ratio, error, in_powers = seen.sizes[at : at + 3]
            if not ratio <= 1:
                return None
            count = seen.counts[at + layout.ZEROS] if zeros else None
            unbounded, max_ulp = seen.counts[at + layout.UNCHECKABLE], in_powers * 2.0 ** (check.fmt.p - 1)
            comparison = Comparison(ratio, check.numel, unbounded, count, error, max_ulp)
            made.append(Checked(check.output, check.name, comparison))
    return tuple(made)


def _with_rows(tensor: Tensor, M: int, N: int) -> Tensor:
    """``tensor`` as (M, N) with a last stride of 1."""
    rows = tensor if tensor.shape == (M, N) else tensor.reshape(M, N)
    return rows if N == 1 or rows.stride(1) == 1 else rows.contiguous()


def _way(judge: Judge, arguments: Sequence[Tensor | int | None], large: Way) -> Way:
    """``large`` for a large case in which every size, stride and address among the ``arguments`` is aligned."""
    if judge.case.M * judge.case.N < _LARGE_ELEMENTS or judge.case.N % _ALIGNED or not judge.x.is_cuda:
        return SMALL
    bits = 0  # of all numbers together: of those that are no multiple of a power of two one is set below it
    for argument in arguments:
        bits |= argument.data_ptr() if isinstance(argument, Tensor) else argument or 0
    return SMALL if bits % _ALIGNED else large


def _stored(rules: Rules, fmt: Format) -> bool:
    """Whether a store in ``fmt`` rounds; the accumulation format's rounding is among those before the store."""
    return fmt.name != rules.model.accumulate


def _flushed(rules: Rules, fmt: Format) -> bool:
    """Whether a subnormal number may be flushed at a store in ``fmt``, see ``rounding.store``."""
    return _stored(rules, fmt) and rules.model.ftz and fmt.emin == FORMATS["fp32"].emin


_numbers_known: dict[Hashable, Tensor] = {}
_MOST_NUMBERS = 256


def _numbers(judge: Judge, y_fmt: Format) -> Tensor:
    """``_numbers_of``, which cases share that agree in what these depend on."""
    case, device = judge.case, judge.x.device
    sizes = (case.dtype, case.M, case.N, case.eps, case.weight, case.weight_dtype, case.options)
    key = (judge.op, judge.rules.model, y_fmt.name, device, *sizes)
    numbers = _numbers_known.get(key)
    if numbers is None:
        if len(_numbers_known) >= _MOST_NUMBERS:
            _numbers_known.clear()
        numbers = _numbers_known[key] = _numbers_of(judge.op, judge.rules.model, case, y_fmt, device)
    return numbers


def _numbers_of(op: Op, model: Model, case: Case, y_fmt: Format, device: torch.device) -> Tensor:
    """``layout.NUMBERS`` of a case, fp64 on ``device``."""
    rules = rounding.rules(op, model, weight=case.weight)
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
        "al_lanes": rules.saved_rstd(case.N),
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
        "alone": rules.alone,
    }
    return torch.tensor([values[name] for name in layout.NUMBERS], dtype=torch.float64, device=device)
