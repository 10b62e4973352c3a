"""The commands of `nemorl`, one module each."""
