"""What the kernels of either make read and write, by position: the numbers of a case, sums, and what they find."""

from __future__ import annotations

NUMBERS = (
    "u", "eta", "eps", "gam_mean", "mean_eta", "gam_var", "c_var", "rs", "limit", "k_y", "al_saved", "al_lanes",
    "lower_clip", "upper_clip", "y_least", "y_half", "per_xhat", "io_least",
    "io_half", "gam_c1", "gam_c2", "k_dx", "gam_raw", "grow", "mean_xh", "dx_half", "dw_io_half", "w_least",
    "dw_half", "db_half", "gam_dw", "gam_db", "rows_eta", "least_32", "alone",
)  # fmt: skip
"""The numbers of a case in fp64, in the order in which the kernels read them."""

FIELDS = 5
"""What is found of each check: the largest ratio, error, and error in powers of two of the binade of the expected
value, as the bits of fp64 numbers >= 0, whose order is that of the numbers; how many zeros would pass; and how many
elements have no finite bound. The last is found on a CPU only."""

ZEROS, UNCHECKABLE = 3, 4

MEAN_CHECK, RSTD_CHECK, OWN_CHECK, Y_CHECK = range(4)
"""The checks of a forward."""

WRONG_BITS, DOUBTFUL_BITS, ZERO_BITS, UNCHECKABLE_ROWS = range(4 * FIELDS, 4 * FIELDS + 4)
OF_FORWARD = 4 * FIELDS + 4
"""Integers that a forward finds: four checks with their fields, the counts of bits, and the rows without bounds."""

DX_CHECK, DW_CHECK, DB_CHECK = range(3)
"""The checks of gradients."""

OF_GRADIENTS = 3 * FIELDS
"""Integers that the gradients' kernels find: three checks with their fields."""

DW, DB, DY_XHAT, DY_SIZE, DY_SHIFT, DW_DOUBT, DB_DOUBT = range(7)
"""Sums over rows for each column: dw, db, their condition sums, the shift of dw, and the doubt of dw and of db."""

WHOLE_SUMS = 7
BOTH_SUMS = 11
"""With dw, dy_xhat, dy_shift and dw_doubt of a kernel that is given the statistics, in this order."""
