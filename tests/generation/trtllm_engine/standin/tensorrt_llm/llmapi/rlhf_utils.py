"""The extension that TensorRT-LLM brings: weights by handles, and None when all have come."""

from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm._torch.utils import get_device_uuid


class WorkerExtension:
    @control_action_decorator
    def update_weights(self, ipc_handles=None):
        engine = self.engine.model_engine
        modules = list(engine.model.modules())
        if not hasattr(engine.model, "first_pre_reload_weights"):
            for module in modules:
                if hasattr(module, "pre_reload_weights"):
                    module.pre_reload_weights()
            engine.model.first_pre_reload_weights = True
        if ipc_handles is None:
            for module in modules:
                if hasattr(module, "process_weights_after_loading"):
                    module.process_weights_after_loading()
            self.engine.reset_prefix_cache()
            del engine.model.first_pre_reload_weights
            return
        name = get_device_uuid(self.device_id)
        if name not in ipc_handles:
            raise ValueError(f"Device UUID {name} not found in ipc_handles")
        weights = {}
        for parameter, (rebuild, arguments) in ipc_handles[name]:
            own = list(arguments)
            own[6] = self.device_id
            weights[parameter] = rebuild(*own)
        engine.model_loader.reload(engine.model, weights, allow_partial_loading=True)

    def reset_prefix_cache(self):
        self.engine.reset_prefix_cache()
