"""The timing of calls on tensors that no cache holds: Triton's do_bench on a GPU, a clock on a CPU.

``do_bench`` (triton.testing) takes the time between two events on the stream around each call, and overwrites the L2
cache before it. The time contains the cost of Python and of launches as far as the GPU has to wait for them. The calls
also take turns on several sets of tensors, which together are larger than twice the L2.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from normcheck.bench.speed import Times

WARMUP_MS, MEASURE_MS = 25, 100
"""Milliseconds of calls before and while time is taken on a GPU."""

CPU_SECONDS, CPU_CALLS = 0.05, 5
"""On a CPU: the most seconds of calls, and the least number of calls."""

CALM, TRIES, SAME = 0.25, 3, 0.02
"""If the quantiles of a GPU's times differ by more than the first share of the median, something disturbed them. They
are then taken again, up to this many times in all, and the closest quantiles count; two medians in a row that differ by
less than the last share are of calls that vary so by themselves, such as a copy of few microseconds."""

MOST_SETS = 64
QUANTILES = (0.5, 0.2, 0.8)

METHOD = {
    "cuda": f"triton.testing.do_bench, {MEASURE_MS} ms after {WARMUP_MS} ms of warm-up: median, quantiles 0.2 and 0.8; "
    f"L2 overwritten before each call, and inputs rotated over more than twice its size; taken again, {TRIES} times at "
    f"most, where the quantiles are more than {100 * CALM:g} % of the median apart and the median is not the same "
    f"within {100 * SAME:g} %: the closest count",
    "cpu": "time.perf_counter around single calls: median, quantiles 0.2 and 0.8; to try the bench, not to compare",
}
"""Device -> how time is taken, in words."""


def cache_bytes(device: str) -> int:
    """The bytes of a GPU's L2 cache; 0 for a CPU, on which inputs are not rotated."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size) if device == "cuda" else 0


def sets_needed(set_bytes: int, cache: int) -> int:
    """The number of sets of ``set_bytes`` that are together larger than twice ``cache`` bytes; from 1 to 64."""
    return min(2 * cache // max(set_bytes, 1) + 1, MOST_SETS)


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that calls the next of ``calls`` each time, and after the last the first."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def timed(call: Callable[[], object], device: str) -> Times:
    """The times of ``call``, which must have run before, so that it compiles nothing any more."""
    if device != "cuda":
        return _by_clock(call)
    from triton.testing import do_bench

    tries: list[Times] = []
    while len(tries) < TRIES and not _settled(tries):
        median, low, high = do_bench(call, warmup=WARMUP_MS, rep=MEASURE_MS, quantiles=list(QUANTILES))
        tries.append(Times(median=float(median), low=float(low), high=float(high)))
    return min(tries, key=_spread)


def _settled(tries: Sequence[Times]) -> bool:
    if not tries or _spread(tries[-1]) <= CALM:
        return bool(tries)
    return len(tries) > 1 and abs(tries[-1].median - tries[-2].median) <= SAME * tries[-1].median


def _spread(times: Times) -> float:
    return (times.high - times.low) / times.median


def _by_clock(call: Callable[[], object]) -> Times:
    seconds: list[float] = []
    while len(seconds) < CPU_CALLS or (sum(seconds) < CPU_SECONDS and len(seconds) < 1000):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    milliseconds = [1e3 * s for s in seconds]
    deciles = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return Times(median=statistics.median(milliseconds), low=deciles[1], high=deciles[7])
