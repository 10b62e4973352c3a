"""Processes on the nodes of a cluster: Ray's runtime, placement, and groups of workers."""

import os

# Read by Ray when it is imported; otherwise it prints a message besides the error that we raise.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing a task")
