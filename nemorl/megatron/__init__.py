"""The policy worker on megatron-core: one path for CPU processes over gloo and GPUs over NCCL."""

import warnings

# Megatron warns at import that kernel libraries are missing (`PolicyWorker.header` says so once), and its
# optimizer and collectives use what torch is about to rename or warns about; users can do nothing about it.
for _message in (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    ".*torch.distributed.* is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)
