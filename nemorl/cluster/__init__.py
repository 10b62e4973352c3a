"""Processes over machines: Ray's runtime, placement, and groups of workers that are called as one."""
