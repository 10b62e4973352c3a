"""A stand-in of Transformer Engine for tests on a CPU; the real library cannot be imported without CUDA.

It has the modules that Megatron's layer specification is built of, with the real ones' arguments, parameter
names, shapes and marks for Megatron (transformer_engine/pytorch/module of its version 2.18), computed by
torch; tests/signatures compares the arguments with the real sources'.
One process each: between tensor-parallel ranks it sends nothing. What it lacks, Megatron goes without.
"""

from . import common as common
from . import pytorch as pytorch

__version__ = "2.18.0"
