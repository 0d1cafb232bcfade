"""What is recorded is what was recorded: a changed or truncated file of golden/ is named."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "golden"


def test_every_golden_file_has_its_checksum() -> None:
    """After a file was recorded anew, in golden/:

    find . -type f ! -name SHA256SUMS | sed 's#^./##' | sort | xargs sha256sum > SHA256SUMS
    """
    lines = (GOLDEN / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    promised = {name: digest for digest, name in (line.split() for line in lines)}
    files = {str(p.relative_to(GOLDEN)): p for p in GOLDEN.rglob("*") if p.is_file() and p.name != "SHA256SUMS"}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == promised


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.json")), ids=lambda path: str(path.relative_to(GOLDEN)))
def test_a_record_names_no_folder_of_the_machine_that_made_it(path: Path) -> None:
    """Frames of a traceback are those of files in this repository, or of packages."""
    found = re.findall(r'"/[^"\s]*/(?:tests|normcheck|docs|golden)/[^"\s:]*', path.read_text(encoding="utf-8"))
    assert not found, f"{found[0]}: expected the path from the top of the repository"
