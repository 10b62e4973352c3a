"""A stand-in for NIXL: its Python API, as far as it is used, between processes of a machine."""
