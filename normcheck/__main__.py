"""``python -m normcheck``."""

from normcheck.cli import main

main()
