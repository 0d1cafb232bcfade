"""How the columns of a row are split: the channels, and the groups of channels, of a sample; the heads of a token."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

CHANNEL_COUNTS = ("root", "few", "many", "each", "one")
"""How many channels the N columns of a grouped op are, simplest first: the largest divisor of N up to its square root;
p, the least prime that divides N; N / p, or N if that is a prime; N, of one element each; 1. A case line may also have
a number that divides N."""

GROUP_COUNTS = ("few", "one", "each", "many")
"""How many groups its C channels are, simplest first: p, the least prime that divides C; 1; C, of one channel each;
C / p, or C if that is a prime; but 1 if each group were one element, of which torch norms none. A case line may also
have a number that divides C."""


_MOST_GROUPS = 65535
"""Of more, as no model has them, "few" are made: torch's own backward on a GPU raises, as a grid has no more."""


class Split(NamedTuple):
    """The N columns of a sample are C ``channels`` of L elements, ``length``, in so many ``groups`` of channels."""

    groups: int
    channels: int
    length: int

    @property
    def columns(self) -> int:
        """The elements of a group."""
        return self.channels * self.length // self.groups


@lru_cache(maxsize=1024)
def split_of(columns: int, channels: str, groups: str) -> Split:
    """How so many columns are split, by a word of CHANNEL_COUNTS, one of GROUP_COUNTS, or numbers."""
    count = _part(columns, channels)
    parts = _part(count, groups)
    if parts == columns and not groups.isdigit():
        parts = 1
    if parts > _MOST_GROUPS and not groups.isdigit():
        parts = least_prime(count)
    return Split(parts, count, columns // count)


def _part(whole: int, word: str) -> int:
    """The divisor of ``whole`` >= 1 that a word says, or a number; 1 if it is none."""
    if word.isdigit():
        return int(word) if whole % int(word) == 0 else 1
    least = least_prime(whole)
    several = whole // least if least < whole else whole
    return {"root": divisor_near_root(whole), "one": 1, "few": least, "many": several, "each": whole}[word]


def heads_of(rows: int) -> int:
    """How many heads each token has whose heads are so many rows: one token of all of them up to 3; else at least two
    tokens, each with as many as fit, up to 8, or 32 from 64 rows on: the largest divisor up to that and half of the
    rows, so 1 if they are a prime.
    """
    most = max(rows, 1) if rows <= 3 else min(_most_parts(rows), rows // 2)
    return next(h for h in range(most, 0, -1) if rows % h == 0)


def others_behind(heads: int) -> int:
    """The heads of k and v that lie behind so many heads of a token: one of both for each four of q."""
    return 2 * math.ceil(heads / 4)


def row_groups_of(rows: int) -> int:
    """How many groups of rows have a weight of their own: as many as there are heads, but each row its own if they are
    a prime up to 8.
    """
    groups = heads_of(rows)
    return rows if groups == 1 and 1 < rows <= _most_parts(rows) else groups


def _most_parts(rows: int) -> int:
    return 8 if rows < 64 else 32


def divisor_near_root(n: int) -> int:
    """The largest divisor of n >= 0 up to its square root, 1 for 0."""
    return next(d for d in range(max(math.isqrt(n), 1), 0, -1) if n % d == 0)


def least_prime(n: int) -> int:
    """The least prime that divides n, 1 for n below 2."""
    return next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), max(n, 1))


HEADS_SPAN = 192
"""N of a rotary op is a multiple of it: three heads of the 64 columns that every N can have."""

HEAD_COLUMNS = ("64", "128", "256", "96")
"""How many columns a head of a rotary op has, those that every kernel takes first. A case line may have another even
number of which N has three at least."""

KV_HEADS = ("sixth", "third", "one")
"""How many of the H heads of a token are of k, and as many of v, simplest first: a sixth, as of four heads of q that
share one of k; a third, as many as of q; 1. A case line may also have a number."""

ROTARY_PARTS = ("all", "half", "quarter")
"""How many of the columns of a head are rotated, its first ones. A case line may also have an even number."""


class Heads(NamedTuple):
    """A row is the heads of a token, of ``columns`` columns each: so many of ``q``, then of ``k``, then of ``v``. The
    first 2 * ``pairs`` columns of those of q and k are rotated.
    """

    q: int
    k: int
    v: int
    columns: int
    pairs: int

    @property
    def normed(self) -> int:
        """The heads of q and k."""
        return self.q + self.k

    @property
    def width(self) -> int:
        """The columns of q and k."""
        return self.normed * self.columns


@lru_cache(maxsize=1024)
def token_heads(columns: int, head: str, kv_heads: str, rotary: str) -> Heads:
    """How the columns of a token are split into heads, by a number, a word of KV_HEADS and one of ROTARY_PARTS, or
    numbers. A head is as wide as said if there are three of them; else it has 64 columns, or as many as are possible.
    """
    size = int(head)
    if columns % size or columns < 3 * size:
        size = max((d for d in range(1, min(64, columns // 3) + 1) if columns % d == 0), key=_as_head, default=1)
    count = columns // size
    of_k = int(kv_heads) if kv_heads.isdigit() else {"sixth": count // 6, "third": count // 3, "one": 1}[kv_heads]
    of_k = min(max(of_k, 1), (count - 1) // 2)
    share = {"all": 1, "half": 2, "quarter": 4}
    pairs = (int(rotary) if rotary.isdigit() else size // share[rotary]) // 2
    return Heads(count - 2 * of_k, of_k, of_k, size, min(max(pairs, 1), size // 2))


def _as_head(size: int) -> tuple[bool, int]:
    """An even number before an odd one, then the largest."""
    return size % 2 == 0, size
