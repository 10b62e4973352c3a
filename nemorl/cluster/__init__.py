"""Processes over machines: Ray's runtime, placement, and groups of workers that are called as one."""

import os

# Ray reads this when it is imported. It would print its own account of a dead worker into the driver's
# output, beside the error that we raise about it.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing a task")
