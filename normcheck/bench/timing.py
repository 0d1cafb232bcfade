"""How long a call takes: triton's do_bench on a GPU, a clock on a CPU; and tensors that no cache still holds.

``do_bench`` (triton.testing) takes the time between two events on the stream around each call, and overwrites the L2
cache before it. What Python and the launches cost is in it as far as the GPU has to wait for them. On top of that the
calls take turns on several sets of tensors, together larger than twice the L2.
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
"""On a CPU: seconds of calls at most, but so many calls at least."""

CALM, TRIES = 0.25, 3
"""A share of the median: where the quantiles of a GPU's times lie further apart, something disturbed them, and they are
taken again, so many times in all; those that lie closest count."""

MOST_SETS = 64
QUANTILES = (0.5, 0.2, 0.8)

METHOD = {
    "cuda": f"triton.testing.do_bench, {MEASURE_MS} ms after {WARMUP_MS} ms of warm-up: median, quantiles 0.2 and 0.8; "
    f"L2 overwritten before each call, and inputs rotated over more than twice its size; taken again, {TRIES} times at "
    f"most, where the quantiles are more than {100 * CALM:g} % of the median apart: the closest count",
    "cpu": "time.perf_counter around single calls: median, quantiles 0.2 and 0.8; to try the bench, not to compare",
}
"""Device -> how time is taken, in words."""


def cache_bytes(device: str) -> int:
    """The size of a GPU's L2 cache; 0 for a CPU, where nothing is rotated."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size) if device == "cuda" else 0


def sets_needed(set_bytes: int, cache: int) -> int:
    """How many sets of tensors of ``set_bytes`` are larger than twice the ``cache``: one at least, 64 at most."""
    return min(2 * cache // max(set_bytes, 1) + 1, MOST_SETS)


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One function that calls the next of ``calls`` each time, round and round."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def timed(call: Callable[[], object], device: str) -> Times:
    """The time of ``call``, which has run before: what it compiles is compiled."""
    if device != "cuda":
        return _by_clock(call)
    from triton.testing import do_bench

    tries: list[Times] = []
    while len(tries) < TRIES and (not tries or _spread(tries[-1]) > CALM):
        median, low, high = do_bench(call, warmup=WARMUP_MS, rep=MEASURE_MS, quantiles=list(QUANTILES))
        tries.append(Times(median=float(median), low=float(low), high=float(high)))
    return min(tries, key=_spread)


def _spread(times: Times) -> float:
    return (times.high - times.low) / times.median


def _by_clock(call: Callable[[], object]) -> Times:
    taken: list[float] = []
    while len(taken) < CPU_CALLS or (sum(taken) < CPU_SECONDS and len(taken) < 1000):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    milliseconds = [1e3 * seconds for seconds in taken]
    deciles = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return Times(median=statistics.median(milliseconds), low=deciles[1], high=deciles[7])
