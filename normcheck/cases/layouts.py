"""The layouts of a case: how its tensors lie in memory, and what shape x has."""

from __future__ import annotations

EXPANDED = ("dy_expanded", "dy_scalar")
"""Layouts in which all rows of dy share one memory."""

RANK4, TRAILING = "rank4", "trailing"
"""The layouts of a batch of batches, (B, S, T, N), and of a norm over two dimensions, see ``Case.sides``."""

HEADS = "heads"
"""The layout of q in a fused projection to q, k and v, see ``Case.heads``."""

CHANNELS_LAST = "channels_last"
"""The layout of an x (B, C, L) whose memory is that of (B, L, C)."""

WEIGHT_STRIDED, WEIGHT_STACKED, WEIGHT_INTERLEAVED = "weight_strided", "weight_stacked", "weight_interleaved"
"""The layouts of weight and bias that are every second element of a buffer, and of those that groups of rows have."""

OF_ROW_GROUPS = (WEIGHT_STACKED, WEIGHT_INTERLEAVED)
"""The layouts in which each group of rows has a weight and a bias of its own, see ``Case.row_groups``."""

OF_WEIGHTS = (WEIGHT_STRIDED, *OF_ROW_GROUPS)
"""The layouts that say how weight and bias lie. Without a weight they say nothing, or that x has rank 3."""

SAMPLES_STRIDED = "samples_strided"
"""The layout of an x (B, S, N) that is a part of the tokens of longer samples, as behind a class token."""

LAYOUTS = (
    *("contiguous", "misaligned", "x_strided", "dy_strided", "strided", "rank3", *EXPANDED, "rank3_strided"),
    *(RANK4, TRAILING, CHANNELS_LAST, SAMPLES_STRIDED, *OF_WEIGHTS, HEADS),
)
"""Simplest first. ``misaligned``: some tensors begin one element behind an aligned address, see ``strides.shift_of``;
``strided``: a gap of ``gap`` elements, or several, follows each row of all tensors, see ``strides.apart``; ``rank3``:
(B, S, N), ``rank3_strided``: both; ``dy_expanded``: dy has row stride 0; ``dy_scalar``: dy is one 1.0 whose strides are
all 0, as from ``y.sum().backward()``; ``heads``: x is (T, H, N), the first H heads of each of T tokens in a buffer that
has other heads behind them, see ``Case.heads``; ``rank4``: (B, S, T, N); ``trailing``: x is (M, A, B) and weight
(A, B), normed over A * B = N elements; ``channels_last``: x (B, C, L) has the strides of (B, L, C), and so has dy, or
one of the two alone; ``weight_strided``: weight and bias have stride 2; ``weight_stacked``: x is (G, S, N) and weight
(G, N), row (g, s) has weight g; ``weight_interleaved``: x is (S, G, N), row (s, g) has weight g; ``samples_strided``:
the gap follows each sample, not each row, of all tensors or of one."""

ROWS_APART = ("x_strided", "dy_strided", "strided")
"""The layouts in which a gap follows each row of x, of dy, and of both."""

STRIDED = (*ROWS_APART, "rank3_strided", SAMPLES_STRIDED)
"""Layouts with a ``gap``. That of ``heads`` may be 0."""

OF_TOKENS = ("contiguous", "misaligned", "x_strided", "dy_strided", "strided", *EXPANDED)
"""The layouts of a rotary op, whose x is (T, N) in each."""

OF_SAMPLES = (*OF_TOKENS, SAMPLES_STRIDED)
"""The layouts of a modulated op, whose x is (B, S, N) in each."""

OF_CHANNELS = (*OF_TOKENS, CHANNELS_LAST, WEIGHT_STRIDED)
"""The layouts of a grouped op, whose x is (B, C, L) in each; a gap is behind each sample."""

HEAD_SIZES = (64, 128, 256, 512)
"""The N of cases of heads that are not a user's own: attention has heads of these sizes, and kernels take no others."""


def head_size_near(columns: int) -> int:
    """The one of HEAD_SIZES that is nearest to an N."""
    return min(HEAD_SIZES, key=lambda size: abs(size - columns))
