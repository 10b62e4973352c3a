"""Eight-bit computation, which is never asked for."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls):
        return False


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    return nullcontext()


def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    return nullcontext()
