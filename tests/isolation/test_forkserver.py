"""What is private to multiprocessing and used all the same: it does what it should, and one file uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import normcheck

TRIED = ("3.11", "3.12")
"""The versions of Python in which multiprocessing has it so."""

SERVER = """
import multiprocessing, os, tempfile
from contextlib import suppress
from multiprocessing import forkserver as theirs, resource_tracker, util
from normcheck.isolation import forkserver

tempfile.tempdir = long = os.path.join(tempfile.mkdtemp(), "x" * 90)
os.mkdir(long)
forkserver.context().set_forkserver_preload([])
assert forkserver.pid() is None
theirs.ensure_running()
first = forkserver.pid()
os.kill(first, 0)
assert not util.get_temp_dir().startswith(long), "its socket is elsewhere"
forkserver.replace()
assert forkserver.pid() is None
with suppress(ProcessLookupError):
    os.kill(first, 0)
    raise SystemExit("the server is there still")
forkserver.context().set_forkserver_preload([])
theirs.ensure_running()
assert forkserver.pid() not in (None, first)
resource_tracker.ensure_running()
before = set(vars(theirs._forkserver)), set(vars(resource_tracker._resource_tracker))
assert type(resource_tracker.getfd()) is type(theirs._forkserver._forkserver_alive_fd) is int
forkserver.forget()
assert before == (set(vars(theirs._forkserver)), set(vars(resource_tracker._resource_tracker))), "nothing new is set"
"""


def test_what_is_private_to_multiprocessing_is_as_it_was() -> None:
    """A server is known, is replaced, has its socket in a folder with a short name, and is left."""
    version = "{}.{}".format(*sys.version_info)
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), f"Python {version}; it was so in {', '.join(TRIED)}"
    assert version in TRIED, f"it is so in Python {version} as well: add that to TRIED"


def test_one_file_knows_it() -> None:
    private = re.compile(r"\b_forkserver\b|\b_resource_tracker\b|\._(config|identity)\b")
    root = Path(normcheck.__file__).parent
    users = {str(p.relative_to(root)) for p in root.rglob("*.py") if private.search(p.read_text(encoding="utf-8"))}
    assert users == {"isolation/forkserver.py"}
