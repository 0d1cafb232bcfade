"""``python -m normcheck``."""

from normcheck.cli.app import main

main()
