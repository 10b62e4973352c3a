"""A run in virtual time: its real driver, over simulated engines, environments and policy."""
