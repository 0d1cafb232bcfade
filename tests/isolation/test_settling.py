"""How a process is settled before it runs a kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SUMS = """
import resource, sys
import numpy as np
from normcheck.isolation.settling import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
a, faults = np.ones(1 << 17, np.float32), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
a + a
before = faults()
for _ in range(20):
    several = [a + a for _ in range(8)]
    del several
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another libc gives freed memory back in its own way")
@pytest.mark.slow
def test_what_is_freed_is_taken_again_in_place_of_new_pages() -> None:
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_", "MALLOC_"))}
    faults = [subprocess.check_output([sys.executable, "-c", SUMS, *how], env=usual) for how in (["keep"], [])]
    kept, given_back = map(int, faults)
    assert kept < 2000 < 15000 < given_back  # 160 times half a MiB are 20,480 pages
