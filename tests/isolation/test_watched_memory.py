"""Memory that a kernel's process takes: the other side lays it, and sees what was written where nothing lies."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.guard_bands import LARGE, NAN, PATTERNS, Pattern
from normcheck.errors import Broken
from normcheck.isolation.shared_memory import HostMemory
from normcheck.isolation.watched_memory import Region, WatchedMemory, in_region
from normcheck.runner.arena import Arena, Surroundings


class Pair:
    """Watched memory, and the other process's view of its memory: two mappings of one file."""

    def __init__(self) -> None:
        here = HostMemory()
        self.watched, self.there = WatchedMemory(here), HostMemory(os.dup(here.fd))
        self.regions: list[Region] = []
        self.held: list[list[Tensor]] = []

    def begin(self, pattern: Pattern = NAN, given: int = 1000) -> Region:
        place = self.watched.lay(given, pattern)
        assert place is not None
        self.regions.append(Region(self.there, *place, tuple(self.regions)))
        return self.regions[-1]

    def without(self) -> Region:
        """Of a call that is too large for a region."""
        return Region(self.there, 0, 0, tuple(self.regions))

    def told(self, **returned: Tensor) -> dict[str, Any]:
        """The answer of a worker, as it arrives."""
        kept = [block for region in self.regions for block in region.kept]
        results = [{"name": name, "lies": in_region(self.there, tensor)} for name, tensor in returned.items()]
        answer = {"returned": results, "region": {"blocks": self.regions[-1].blocks, "kept": kept}}
        loaded: dict[str, Any] = json.loads(json.dumps(answer))
        return loaded


@pytest.fixture
def pair() -> Pair:
    return Pair()


def taken(region: Region, dtype: torch.dtype = torch.float16, fresh: Pattern = NAN, around: Pattern = NAN) -> Tensor:
    """3 rows of 5, as torch.empty returns them in an arena with this region."""
    with Arena(Surroundings(NAN, fresh, around)) as arena:
        arena.region = region
        return torch.empty((3, 5), dtype=dtype)


def poke(tensor: Tensor, at: int, value: float = 0.0) -> None:
    """Write one element ``at`` elements behind the first one."""
    tensor.as_strided((1,), (1,), tensor.storage_offset() + at).fill_(value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=lambda p: p.name)
def test_what_was_laid_is_the_pattern_of_each_dtype(pair: Pair, pattern: Pattern, dtype: torch.dtype) -> None:
    out = taken(pair.begin(pattern), dtype, pattern, pattern)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    assert (out.view(integers) == pattern.bits[dtype]).all()
    assert not out._is_view()
    assert out.data_ptr() % 512 == 0
    out.fill_(1)
    assert pair.watched.look(pair.told(y=out)) == []


def test_fresh_memory_may_have_another_pattern(pair: Pair) -> None:
    out = taken(pair.begin(NAN), fresh=LARGE)
    assert (out > 1e4).all()
    assert pair.watched.look(pair.told(y=out)) == []


@pytest.mark.parametrize(
    ("at", "words"), [(15, "1 behind its last"), (20, "6 behind its last"), (-3, "3 before its first element")]
)
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_write_beside_a_block_is_found(pair: Pair, at: int, words: str, value: float) -> None:
    region = pair.begin()
    one, other = taken(region), taken(region, torch.float32)
    one.fill_(1)
    poke(other, at, value)
    assert pair.watched.look(pair.told(y=one, rstd=other)) == [("rstd", 15, 1, words)]


def test_who_hides_his_blocks_has_written_where_nothing_lies(pair: Pair) -> None:
    region = pair.begin()
    out = taken(region).fill_(1.0)
    region.blocks.clear()
    region._owners.clear()
    assert pair.watched.look(pair.told(y=out)) == [("", 0, 30, "where it says that it has allocated nothing")]


def test_a_write_is_told_once(pair: Pair) -> None:
    out = taken(pair.begin())
    poke(out, 15)
    assert len(pair.watched.look(pair.told(y=out))) == 1
    pair.begin()
    assert pair.watched.look(pair.told()) == []


def test_memory_that_is_kept_is_nobody_elses_and_is_looked_at(pair: Pair) -> None:
    held = taken(pair.begin()).fill_(3.0)
    assert pair.watched.look(pair.told(workspace=held)) == []
    for _ in range(3):
        with_it = taken(pair.begin()).fill_(1.0)
        assert pair.watched.look(pair.told(y=with_it)) == []
        del with_it
    assert (held == 3).all()
    assert (
        len({region._end for region in pair.regions}) == 3
    )  # its own, and two by turns: what was returned is in use until the next answer
    pair.begin()
    poke(held, -1)
    assert pair.watched.look(pair.told()) == [("workspace", 15, 1, "1 before its first element")]


def test_a_result_in_the_memory_of_the_one_before(pair: Pair) -> None:
    out = taken(pair.begin())
    assert pair.watched.look(pair.told(y=out)) == []
    pair.begin()
    with pytest.raises(Broken, match="y of two calls lies in the same memory") as raised:
        pair.watched.look(pair.told(y=out))
    assert (raised.value.kind, raised.value.output) == ("not_repeatable", "y")


def test_a_result_that_was_freed_may_lie_there_again(pair: Pair) -> None:
    places = set()
    for _ in range(3):
        out = taken(pair.begin())
        places.add(in_region(pair.there, out))
        assert pair.watched.look(pair.told(y=out)) == []
        del out
        pair.begin()
        assert pair.watched.look(pair.told()) == []
    assert len(places) == 1


def test_a_call_has_the_memory_of_earlier_ones_that_nobody_holds(pair: Pair) -> None:
    """Whatever their patterns and sizes: memory that nobody has touched costs its pages. The latest was still held."""
    places = set()
    for given, pattern in [(1000, NAN), (1 << 20, LARGE), (1 << 22, NAN), (5000, LARGE), (1 << 21, LARGE)]:
        out = taken(pair.begin(pattern, given), fresh=pattern, around=pattern)
        places.add(in_region(pair.there, out))
        poke(out, -1)
        (stray,) = pair.watched.look(pair.told(y=out))
        assert stray.name == "y"
    assert len(places) == 2


def test_what_does_not_fit_is_left_to_the_arena(pair: Pair) -> None:
    assert pair.watched.lay(1 << 30, NAN) is None
    assert pair.watched.look({}) == []  # such an answer tells of no region
    region = pair.begin()
    with Arena(Surroundings()) as arena:
        arena.region = region
        out = torch.empty(1 << 20)
    assert in_region(pair.there, out) is None
    poke(out, 1 << 20)
    assert [stray.where for stray in arena.strays({})] == ["1 behind its last"]
    assert pair.watched.look(pair.told(y=out)) == []


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("rows", [6, 6000], ids=["into its band", "beyond it"])
@pytest.mark.parametrize("planned", [True, False], ids=["region", "own memory"])
def test_what_is_watched_can_grow(pair: Pair, planned: bool, rows: int, dtype: torch.dtype) -> None:
    """As every tensor can: by itself, and as what another operation writes to. Its bands are no room for it."""
    x = torch.arange(rows * 5).remainder(7).view(rows, 5).to(dtype)
    region = pair.begin()
    with Arena(Surroundings()) as arena:
        arena.region = region if planned else None
        grown = torch.zeros(2, 3, dtype=dtype)
        kept = torch.ones(2, 3, dtype=dtype)
        assert (in_region(pair.there, grown) is not None) == planned
        grown.resize_(rows * 4).fill_(1)
        written = torch.empty(3, dtype=dtype)
        torch.add(x[:, 0], x[:, 1], out=written)
        place = kept.data_ptr()
        torch.add(kept, kept, out=kept)
        kept.resize_(3, 2)
        with pytest.raises(RuntimeError, match="shape"):
            torch.zeros(2, 3).view(7)
    assert torch.equal(grown, torch.ones(rows * 4, dtype=dtype)) and torch.equal(written, x[:, 0] + x[:, 1])
    assert kept.data_ptr() == place and kept.tolist() == [[2, 2]] * 3  # as large as before: where it was
    assert pair.watched.look(pair.told()) == [] and arena.strays({}) == []


def test_an_emptied_buffer_is_written_anew(pair: Pair) -> None:
    """As torch's own warning recommends; its memory is that of its block still."""
    x = torch.arange(300.0)
    with Arena(Surroundings()) as arena:
        arena.region = pair.begin()
        work = torch.empty(100)
        work.resize_(0)
        torch.mul(x, 2, out=work)
    assert torch.equal(work, x * 2)
    assert pair.watched.look(pair.told()) == []


@pytest.mark.parametrize("rows", [300, 300_000])
def test_a_workspace_of_an_earlier_call_grows_in_a_call_without_a_plot(pair: Pair, rows: int) -> None:
    with Arena(Surroundings()) as arena:
        arena.region = pair.begin()
        work = torch.empty(100).fill_(3)
    assert pair.watched.look(pair.told()) == []
    with Arena(Surroundings(LARGE, LARGE, LARGE)) as arena:
        arena.region = pair.without()
        torch.empty(3)
        work.resize_(rows)[100:] = 4
    assert work[:100].eq(3).all() and work[100:].eq(4).all() and in_region(pair.there, work) is None
    pair.begin()
    assert pair.watched.look(pair.told()) == []


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_part_of_a_buffer_grows_within_it(pair: Pair) -> None:
    """As without an arena: the buffer has what was written to its part."""
    for planned in (True, False):
        with Arena(Surroundings()) as arena:
            arena.region = pair.begin() if planned else None
            whole = torch.zeros(1000).fill_(3)
            torch.mul(torch.ones(50), 2, out=whole[:5])
        assert [whole[at].item() for at in (0, 40, 49, 50, 999)] == [2, 2, 2, 3, 3]
        assert arena.strays({}) == []


def test_memory_of_somebody_else_does_not_grow(pair: Pair) -> None:
    numbers = torch.frombuffer(bytearray(16), dtype=torch.float32)
    with Arena(Surroundings()) as arena:
        arena.region = pair.begin()
        with pytest.raises(RuntimeError, match="not resizable"):
            numbers.resize_(1000)


def test_a_call_with_very_many_tensors(pair: Pair) -> None:
    """Those beyond the most lie in the kernel's own memory, where the arena looks after them."""
    for _ in range(3):
        region = pair.begin(given=1 << 20)
        with Arena(Surroundings()) as arena:
            arena.region = region
            pair.held.append([torch.zeros(1) for _ in range(700)])
        assert len(region.blocks) == 500
        assert pair.watched.look(pair.told()) == [] and arena.strays({}) == []


FORGED: tuple[object, ...] = (
    None,
    {},
    {"blocks": [], "kept": 3},
    {"blocks": [[0, 30, 2]], "kept": []},
    {"blocks": "begin", "kept": []},
    {"blocks": [[1.5, 2, 3]], "kept": []},
    {"blocks": [[True, 2, 3]], "kept": []},
    {"blocks": [[1, 2]], "kept": []},
    {"blocks": [], "kept": [["a", "b", "c"]]},
    {"blocks": [[0, 1, 2]] * 501, "kept": []},
)


@pytest.mark.parametrize("forged", FORGED, ids=lambda f: str(f)[:40])
def test_an_answer_that_does_not_tell_is_a_crash(pair: Pair, forged: object) -> None:
    pair.begin()
    with pytest.raises(Broken, match="did not tell what it allocated") as raised:
        pair.watched.look({"region": forged})
    assert raised.value.kind == "crash"


def test_blocks_that_lie_across_one_another_are_no_answer(pair: Pair) -> None:
    region = pair.begin()
    first = taken(region)
    (block,) = region.blocks
    for forged in ([block, block], [block, (block.at + 2, block.end, 2)], [(block.at, block.end, 3)], [(9, 8, 2)]):
        region = pair.begin()
        with pytest.raises(Broken, match="did not tell"):
            pair.watched.look({"region": {"blocks": [list(item) for item in forged], "kept": []}})
    assert first.shape == (3, 5)


def test_nobody_asked_is_nobody_to_answer(pair: Pair) -> None:
    assert pair.watched.look({"value": None}) == []
