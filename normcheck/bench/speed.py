"""The results of a bench, as plain frozen data: bytes over time of verified kernels. Reports read nothing else.

GB/s is 1e9 bytes a second. The bytes are those that the suite counts, not those that a kernel moves. So the faster of
two kernels has the greater number, and a kernel that reads its input twice cannot hide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from normcheck.cases.op import BLOCKS
from normcheck.cases.ops import OPS
from normcheck.result import Finding

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)
COPY = "copy"
"""The name of the ceiling: a copy that reads half of the counted bytes and writes the other half."""

MEASURED, FAIL, SKIP, ERROR = "measured", "fail", "skip", "error"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One line of a table: an op on x (M, N). ``weight_dtype``: ``same`` or ``fp32``; ``bias``: whether there is one.

    ``options``: the op's additional numbers, as in a case. ``scale``: of an implementation that returns codes, its
    model's: "given", or what shares a scale that it returns.
    """

    op: str
    dtype: str
    M: int
    N: int
    weight_dtype: str = "same"
    eps: float = 1e-5
    bias: bool = True
    options: tuple[tuple[str, float], ...] = ()
    scale: str = ""

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions that the op has."""
        return (FORWARD,) if OPS[self.op].quantises else DIRECTIONS

    @property
    def scales(self) -> int:
        """How many scales there are; if the shape of a returned one is not known, one for each row."""
        if self.scale in ("", "given"):
            return int(self.scale == "given")
        return self.M * -(-self.N // BLOCKS.get(self.scale, self.N))

    @property
    def table(self) -> tuple[str, str, str, bool, int]:
        """The key of the point's table: what its lines have in common. They differ in N."""
        return (self.op, self.dtype, self.weight_dtype, self.bias, self.M)


@dataclass(frozen=True, kw_only=True)
class Count:
    """The counting of one direction's bytes: (M, N) matrices in the io dtype, (N,) vectors in the weights' dtype.

    ``bias_vectors`` are counted only with a bias. ``named``: input that a function gets by name -> the matrices that it
    adds, in the io dtype too, and these in words.
    An op that returns codes has one of a byte an element in place of y, and scales in fp32.
    ``text``: the other tensors, in words.
    """

    text: str
    matrices: int
    vectors: int = 0
    bias_vectors: int = 0
    named: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def words(self, points: Iterable[Point]) -> str:
        """The tensors of these points, in words."""
        ops = [OPS[point.op] for point in points]
        having = {name for op in ops for name in op.by_name}
        codes = any(op.quantises for op in ops)
        more = "".join(f", with a {name} {words}" for name, (_, words) in self.named.items() if name in having)
        return f"{self.text}{more}{', or codes, 1 byte an element, and their scales' if codes else ''}"

    def bytes(self, point: Point) -> int:
        """The bytes that are counted at ``point``."""
        io = 4 if point.dtype == "fp32" else 2
        weight = io if point.weight_dtype == "same" else 4
        vectors = (self.vectors + self.bias_vectors * point.bias) * (True in OPS[point.op].weights_of((True,)))
        matrices = self.matrices + sum(self.named[name][0] for name in OPS[point.op].by_name if name in self.named)
        narrower = (io - 1) * OPS[point.op].quantises
        return (matrices * io - narrower) * point.M * point.N + vectors * point.N * weight + 4 * point.scales


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of one call: the median, and the quantiles 0.2 and 0.8."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One direction of one implementation at one point.

    ``status``: measured; fail (a finding, and no number); skip (it did not run, for the reason in ``detail``); error
    (normcheck itself failed, as in ``detail``). ``verified_rows`` of the M rows passed just before, in ``cases`` cases.
    ``note``: what else a reader of the number must know.
    """

    point: Point
    implementation: str
    direction: str
    status: str
    bytes: int
    detail: str = ""
    times: Times | None = None
    copy_times: Times | None = None
    verified_rows: int = 0
    cases: int = 0
    note: str = ""
    failure: Finding | None = None

    @property
    def gb_per_s(self) -> float | None:
        """The counted bytes over the median time, in 1e9 bytes a second; None if nothing was measured."""
        return None if self.times is None else self.bytes / self.times.median * 1e-6

    @property
    def copy_gb_per_s(self) -> float | None:
        """The same bytes over the median time of a copy of them; None if no copy was timed."""
        return None if self.copy_times is None else self.bytes / self.copy_times.median * 1e-6

    @property
    def share_of_copy(self) -> float | None:
        """The copy's median time over that of the call; None if either is missing."""
        if self.times is None or self.copy_times is None:
            return None
        return self.copy_times.median / self.times.median


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A whole bench. ``counting``: direction -> the counted bytes, in words; ``method``: how time was taken.

    ``suite`` and ``source`` are empty if the user gave the sizes. ``device``: "cpu" or "cuda".
    """

    argv: tuple[str, ...]
    suite: str
    source: str
    device: str
    seconds: float
    environment: Mapping[str, str]
    counting: Mapping[str, str]
    method: str
    speeds: tuple[Speed, ...]
    exit_code: int
    complete: bool = True

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names, in the order of the run."""
        return tuple(dict.fromkeys(speed.implementation for speed in self.speeds))

    @property
    def tables(self) -> tuple[tuple[Speed, ...], ...]:
        """The speeds of each table: those that differ in N and implementation only, forward before backward."""
        tables: dict[tuple[object, ...], list[Speed]] = {}
        for speed in self.speeds:
            tables.setdefault((*speed.point.table, DIRECTIONS.index(speed.direction)), []).append(speed)
        order = list(dict.fromkeys(speed.point.table for speed in self.speeds))
        return tuple(tuple(tables[key]) for key in sorted(tables, key=lambda key: (order.index(key[:-1]), key[-1])))  # type: ignore[arg-type]

    def with_status(self, status: str) -> tuple[Speed, ...]:
        """The speeds that have this status."""
        return tuple(speed for speed in self.speeds if speed.status == status)
