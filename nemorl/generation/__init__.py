"""Sampling: one protocol, the engines behind it, and the worker that runs one."""
