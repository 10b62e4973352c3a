"""Random states."""


class CudaRNGStatesTracker:
    pass


def activation_recompute_forward(*_, **__):
    raise NotImplementedError
