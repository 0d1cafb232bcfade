"""``verify``: options, plan, sweep of each cell, verdicts, exit code. Imports checks, isolation, reports and below."""
