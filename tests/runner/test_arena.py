"""Guard bands, gaps and fresh memory: what was written there is found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.guard_bands import LARGE, NAN, NEGATIVE
from normcheck.errors import Broken
from normcheck.impls.kernels.interpreter import enable
from normcheck.runner import arena
from normcheck.runner.arena import Arena, Surroundings

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PATTERNS = (NAN, LARGE, NEGATIVE)


def strided(dtype: torch.dtype = torch.float16) -> Tensor:
    """3 rows of 5 elements with 2 behind each."""
    return guard_bands.placed((3, 5), (7, 1), dtype, "cpu").copy_(torch.arange(15).view(3, 5))


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_patterns_say_what_they_are(pattern: guard_bands.Pattern) -> None:
    for dtype in (*DTYPES, torch.float64):
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        value = float(torch.tensor(pattern.bits[dtype], dtype=integers).view(dtype))
        if pattern is NAN:
            assert value != value
        else:
            assert abs(value) > 1e4
            assert abs(value) <= torch.finfo(dtype).max
            assert (value < 0) == (pattern is NEGATIVE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_computation_makes_the_nan(dtype: torch.dtype) -> None:
    integers = torch.int16 if dtype.itemsize == 2 else torch.int32
    zero, infinity = torch.zeros((), dtype=dtype), torch.full((), float("inf"), dtype=dtype)
    for made in (zero / zero, infinity - infinity, infinity * 0, -(zero / zero), torch.tensor(float("nan")).to(dtype)):
        assert int(made.view(integers)) != NAN.bits[dtype]


def test_bands_keep_the_alignment() -> None:
    for dtype in DTYPES:
        for n in (1, 7, 1000, 4097):
            assert guard_bands.placed((2, n), (n, 1), dtype, "cpu").storage_offset() * dtype.itemsize % 512 == 0
    assert guard_bands.placed((2, 7), (7, 1), torch.float16, "cpu", shift=1).storage_offset() % 256 == 1


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_a_copy_has_the_values_and_the_pattern(pattern: guard_bands.Pattern) -> None:
    original = strided()
    copied = guard_bands.copy(original, pattern)
    assert torch.equal(copied, original)
    assert copied.stride() == original.stride()
    assert copied.data_ptr() != original.data_ptr()
    gap = copied.as_strided((3, 2), (7, 1), copied.storage_offset() + 5).view(torch.int16)
    assert (gap == pattern.bits[torch.float16]).all()


WRITES: tuple[tuple[int, str], ...] = (
    (5, "1 behind the end of row 0"),
    (6, "2 behind the end of row 0"),
    (12, "1 behind the end of row 1"),
    (19, "1 behind its last element"),
    (22, "4 behind its last element"),
    (-1, "1 before its first element"),
    (-200, "200 before its first element"),
)


@pytest.mark.parametrize(("at", "words"), WRITES)
def test_a_write_outside_is_found_and_placed(at: int, words: str) -> None:
    before = strided()
    after = guard_bands.copy(before, NAN)
    assert guard_bands.untouched(before, after)
    assert guard_bands.trespass(before, after) == (0, "")
    after.as_strided((1,), (1,), after.storage_offset() + at).fill_(0)
    assert not guard_bands.untouched(before, after)
    assert torch.equal(before, after)
    assert guard_bands.trespass(before, after) == (1, words)


def test_a_nan_written_over_the_nan_is_found() -> None:
    before = strided()
    after = guard_bands.copy(before, NAN)
    after.as_strided((1,), (1,), after.storage_offset() + 5).fill_(float("nan"))
    assert guard_bands.trespass(before, after) == (1, "1 behind the end of row 0")


def test_a_write_inside_is_no_trespass() -> None:
    before = strided()
    after = guard_bands.copy(before, NAN)
    after[1, 4] = 99
    assert not guard_bands.untouched(before, after)
    assert guard_bands.trespass(before, after) == (0, "")
    assert int(guard_bands.differing(before, after).sum()) == 1


@pytest.mark.parametrize("block", [1, 5, 64])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(guard_bands, "BLOCK_ELEMENTS", block)
    for at, words in WRITES:
        test_a_write_outside_is_found_and_placed(at, words)
    before = strided()
    after = guard_bands.copy(before, NAN)
    for at in (19, 22, -200):
        after.as_strided((1,), (1,), after.storage_offset() + at).fill_(0)
    assert guard_bands.trespass(before, after) == (3, "200 before its first element")
    for shape in ((1, 40), (40,), (3, 5, 7), (9, 2), (0, 3), ()):
        one = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        other = torch.where(torch.arange(one.numel()).view(shape) % 3 == 0, one + 1, one)
        assert guard_bands.how_many_differ(one, other) == int((one != other).sum())
        assert guard_bands.same_bits(one, one.clone()) and guard_bands.same_bits(one, other) == (not one.numel())


@pytest.mark.parametrize("change", [lambda t: t.resize_(2, 2), lambda t: t.t_(), lambda t: t.set_(torch.ones(2))])
def test_another_geometry_is_noticed(change: Callable[[Tensor], Tensor]) -> None:
    before = strided(torch.float32)
    after = guard_bands.copy(before, NAN)
    assert not guard_bands.moved(before, after)
    change(after)
    assert guard_bands.moved(before, after)


def test_any_nan_is_as_good_as_another() -> None:
    a = torch.tensor([0x7E00, 0x3C00], dtype=torch.int16).view(torch.float16)
    b = torch.tensor([0x7E01, 0x3C00], dtype=torch.int16).view(torch.float16)
    assert guard_bands.same_bits(a, b)
    assert not guard_bands.same_bits(a, torch.ones(2, dtype=torch.float16))
    assert not guard_bands.same_bits(torch.zeros(1), -torch.zeros(1))
    assert not guard_bands.same_bits(torch.zeros(2), torch.zeros(1, 2))


FRESH: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: torch.empty(3, 5),
    lambda t: torch.empty_like(t),
    lambda t: torch.empty_strided((3, 5), (1, 3)),
    lambda t: torch.empty_permuted((3, 5), (1, 0)),
    lambda t: t.new_empty(3, 5),
    lambda t: t.new_empty_strided((3, 5), (6, 1)),
    lambda t: torch.empty((3, 5), dtype=torch.bfloat16),
    lambda t: torch.empty((3, 5), dtype=torch.uint8),
)
FILLED: tuple[tuple[Callable[[Tensor], Tensor], float], ...] = (
    (lambda t: torch.zeros(3, 5), 0.0),
    (lambda t: torch.ones_like(t), 1.0),
    (lambda t: torch.full((3, 5), 2.5), 2.5),
    (lambda t: t.new_zeros(3, 5), 0.0),
    (lambda t: t.new_full((3, 5), 4.0), 4.0),
)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
@pytest.mark.parametrize("make", FRESH)
def test_fresh_memory_is_poisoned(make: Callable[[Tensor], Tensor], pattern: guard_bands.Pattern) -> None:
    like = torch.zeros(3, 5)
    plain = make(like)
    with Arena(Surroundings(fresh=pattern)) as arena:
        out = make(like)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    assert (out.view(integers) == pattern.bits[out.dtype]).all()
    assert (out.shape, out.stride(), out.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert not out._is_view()
    assert arena.strays({}) == []


@pytest.mark.parametrize(("make", "value"), FILLED)
def test_what_torch_promises_stays(make: Callable[[Tensor], Tensor], value: float) -> None:
    with Arena(Surroundings(LARGE, LARGE, LARGE)) as arena:
        out = make(torch.zeros(3, 5))
    assert (out == value).all()
    assert arena.strays({}) == []


@pytest.mark.parametrize(
    ("at", "words"), [(15, "1 behind its last"), (20, "6 behind its last"), (-3, "3 before its first element")]
)
@pytest.mark.parametrize("make", [FRESH[0], FILLED[0][0]])
def test_an_overrun_of_what_was_allocated_is_found(make: Callable[[Tensor], Tensor], at: int, words: str) -> None:
    with Arena(Surroundings()) as arena:
        out = make(torch.zeros(3, 5))
        other = make(torch.zeros(3, 5))
    other.fill_(7)
    out.as_strided((1,), (1,), out.storage_offset() + at).fill_(0)
    ((name, elements, count, where),) = arena.strays({"out": out, "other": other})
    assert (name, elements, count, where) == ("out", out.numel(), 1, words)


def test_a_write_to_the_pattern_that_bands_are_compared_with_is_found_once() -> None:
    """On a GPU it lies among what the kernel allocates, and may be what is behind the end of an output."""
    with Arena(Surroundings()) as arena:
        out = torch.zeros(3, 5)
    ((_, kept), _) = arena._bands(*arena._blocks[0])
    kept[2] = 0
    ((name, elements, _, where),) = arena.strays({"out": out})
    assert (name, elements, where) == ("", 0, "where it says that it has allocated nothing")
    assert arena.strays({"out": out}) == []


def test_what_the_arena_leaves_alone() -> None:
    with Arena(Surroundings()):
        for tensor in (
            torch.empty(0),
            torch.zeros(2, requires_grad=True),
            torch.empty(2, device="meta"),
            torch.zeros(2, dtype=torch.complex64),
            torch.zeros(2, 2).to_sparse(),
        ):
            assert tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= 32
        into = torch.ones(2)
        assert torch.zeros(2, out=into) is into


def test_what_the_runtime_of_torch_compile_allocates_is_left_alone() -> None:
    """It wants every block in the pool of its graphs back, in which a band would live on."""
    runtime = {"__name__": "torch._inductor.compile_fx", "torch": torch}
    exec("def made(): return torch.zeros(5)", runtime)
    with Arena(Surroundings()):
        assert runtime["made"]().untyped_storage().nbytes() == 20  # type: ignore[operator]
        with torch.device("cpu"):  # a mode of its own
            assert runtime["made"]().untyped_storage().nbytes() == 20  # type: ignore[operator]
        assert torch.zeros(5).untyped_storage().nbytes() > 20


def test_gradients_flow_through_what_was_allocated() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    with Arena(Surroundings()):
        y = torch.empty(3, 5)
        y.copy_(x * 2)
        (dx,) = torch.autograd.grad(y, x, torch.ones(3, 5))
    assert (dx == 2).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_on_a_gpu() -> None:
    with Arena(Surroundings(fresh=LARGE)) as arena:
        out = torch.empty(3, 5, device="cuda")
    assert (out > 1e29).all()
    assert out.data_ptr() % 512 == 0
    assert arena.strays({}) == []
    out.as_strided((1,), (1,), out.storage_offset() + 15).fill_(0)
    assert len(arena.strays({})) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_graphs_that_torch_compile_makes_are_recorded_in_an_arena() -> None:
    compiled = torch.compile(lambda x: (x * 2).sum(-1, keepdim=True) + x, mode="reduce-overhead")
    for seed in range(4):  # warmed up, recorded, replayed
        x = torch.full((5, 6), float(seed), device="cuda", requires_grad=True)
        with Arena(Surroundings()):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(x).clone()
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert (y == 13.0 * seed).all() and (dx == 13.0).all()


@pytest.mark.slow
def test_what_torch_compile_traces_is_let_through() -> None:
    """A compiled kernel is compiled in an arena too; dynamo cannot trace what an arena does."""
    if not torch.cuda.is_available():
        enable()  # dynamo imports triton, and another test of this process may need its interpreter

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x) + torch.zeros(3)

    with arena.Arena(arena.Surroundings()):
        returned = compiled(torch.ones(3))
        allocated = torch.empty(3)
    assert returned.tolist() == [1, 1, 1]
    assert allocated.isnan().all()


def test_a_result_that_was_returned_too_early_is_told_when_its_run_is_looked_at() -> None:
    """Whether it changed after its stream's work is known only then: nobody waits for it before."""
    arena = Arena(Surroundings())
    assert arena.clean() is None
    assert arena.strays({}) == []
    arena.note("y", torch.tensor(True))
    assert arena.clean() == torch.tensor(True)
    assert arena.strays({}) == []
    arena.note("rstd", torch.tensor(False))
    assert arena.clean() == torch.tensor(False)
    with pytest.raises(Broken, match="rstd was still being written, by another stream") as raised:
        arena.strays({})
    assert (raised.value.kind, raised.value.output) == ("not_repeatable", "rstd")
