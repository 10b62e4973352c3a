"""A stand-in of NVIDIA's apex for tests on a CPU; the real one is built with CUDA.

It has the optimizers that Megatron takes, with the real ones' arguments and states (main of 2026), computed
by torch. tests/signatures compares the arguments with the real sources'.
"""

from . import optimizers as optimizers
