"""The engine in a worker: a thread that steps, requests that join and leave, and standing still for others.

The model is transformers' own. To be as strict as the real one, it refuses to sample between the first
handles of an update and the final None, and takes whole HF tensors only.
"""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType
from tensorrt_llm.sampling_params import LogprobMode


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(eq=False)
class LlmRequest:
    py_client_id: int
    tokens: list
    params: object
    py_orig_prompt_len: int
    cache: DynamicCache = field(default_factory=DynamicCache)
    cancelled: bool = False

    def get_num_tokens(self, beam):
        return len(self.tokens)


class Model(torch.nn.Module):
    """The network, which has to be prepared after every loading."""

    def __init__(self, folder):
        super().__init__()
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.prepared = True

    def pre_reload_weights(self):
        self.prepared = False

    def process_weights_after_loading(self):
        self.prepared = True


class ModelLoader:
    def reload(self, model, weights, allow_partial_loading=False):
        parameters = dict(model.network.named_parameters())
        if not allow_partial_loading and weights.keys() != parameters.keys():
            raise ValueError("not all weights are there")
        for name, tensor in weights.items():
            if tensor.shape != parameters[name].shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}")
            with torch.no_grad():
                parameters[name].copy_(tensor)


class PyExecutor:
    def __init__(self, llm_args, rank):
        self.llm_args, self.rank = llm_args, rank
        self.model_engine = SimpleNamespace(model=Model(llm_args.model), model_loader=ModelLoader())
        self.memory = {tag.value for tag in ExecutorMemoryType}
        self.active_requests = []
        self.waiting_queue = []
        self.num_prefix_resets = self.num_recomputed = 0
        self._responses = []
        self._changed = threading.Condition()
        self._control_lock = threading.Lock()
        self._owner = None
        self._control = None  # a request to pause: whether it drains
        self._barrier, self._done = threading.Event(), threading.Event()
        self._stopped = False
        threading.Thread(target=self._loop, name="executor", daemon=True).start()

    @contextmanager
    def control_action(self, control_id=None, drain=True):
        if self._owner == threading.get_ident():
            raise RuntimeError("control_action() is not re-entrant")
        with self._control_lock:
            self._owner = threading.get_ident()
            try:
                with self._changed:
                    self._control = drain
                    self._changed.notify_all()
                self._barrier.wait()
                try:
                    yield self
                finally:
                    self._barrier.clear()
                    self._done.set()
            finally:
                self._owner = None

    def enqueue(self, client_id, prompt, params):
        with self._changed:
            self.waiting_queue.append(LlmRequest(client_id, list(prompt), params, len(prompt)))
            self._changed.notify_all()

    def cancel(self, client_id):
        with self._changed:
            for request in [*self.waiting_queue, *self.active_requests]:
                request.cancelled |= request.py_client_id == client_id
            self._changed.notify_all()

    def take_responses(self, seconds):
        with self._changed:
            self._changed.wait_for(lambda: self._responses, timeout=seconds)
            taken, self._responses = self._responses, []
            return taken

    def reset_prefix_cache(self):
        self.num_prefix_resets += 1

    def recompute_active_requests(self):
        for request in self.active_requests:
            request.cache = DynamicCache()
        self.num_recomputed += len(self.active_requests)

    def shutdown(self):
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _loop(self):
        while not self._stopped:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._stopped
                        or self._control is not None
                        or self.waiting_queue
                        or self.active_requests
                    )
                )
                free = self.llm_args.max_batch_size - len(self.active_requests)
                self.active_requests += self.waiting_queue[:free]
                del self.waiting_queue[:free]
            self._stand_if_asked()
            for request in list(self.active_requests):
                self._step(request)

    def _stand_if_asked(self):
        if self._control is None or (self._control and (self.active_requests or self.waiting_queue)):
            return
        self._control = None
        self._done.clear()
        self._barrier.set()
        self._done.wait()

    def _step(self, request):
        if request.cancelled:
            self._answer(request, [], [], "cancelled", 0)
            return
        model = self.model_engine.model
        assert model.prepared, "sampling with weights that were never processed after loading"
        assert len(self.memory) == len(ExecutorMemoryType), "sampling with memory that was given back"
        seen = request.cache.get_seq_length()
        with torch.no_grad():
            found = model.network(
                torch.tensor([request.tokens[seen:]]), past_key_values=request.cache, use_cache=True
            )
        token, logprob = _draw(found.logits[0, -1].float(), request)
        request.tokens.append(token)
        params = request.params
        sampled = len(request.tokens) - request.py_orig_prompt_len
        reason, trimmed = None, 0
        if token in (params.stop_token_ids or ()) or token == params.end_id:
            reason = "stop"
            trimmed = 0 if params.include_stop_str_in_output else 1
        elif sampled >= params.max_tokens or len(request.tokens) >= self.llm_args.max_seq_len:
            reason = "length"
        self._answer(request, [token], [{token: Logprob(logprob)}], reason, trimmed)

    def _answer(self, request, tokens, logprobs, reason, trimmed):
        with self._changed:
            if reason is not None:
                self.active_requests.remove(request)
            self._responses.append((request.py_client_id, tokens, logprobs, reason, trimmed))
            self._changed.notify_all()


def _draw(logits, request):
    """A token and its logprob; sampling without regard for other engines' ways."""
    params = request.params
    raw = logits.log_softmax(-1)
    if params.greedy:
        token = int(logits.argmax())
        return token, float(raw[token])
    kept = (logits / (params.temperature or 1.0)).log_softmax(-1)
    if params.top_k:
        kept = kept.masked_fill(kept < kept.topk(params.top_k).values[-1], -torch.inf).log_softmax(-1)
    if params.top_p is not None and params.top_p < 1:
        ordered, order = kept.sort(descending=True)
        cut = ordered.exp().cumsum(-1) - ordered.exp() >= params.top_p
        kept = kept.masked_fill(torch.zeros_like(cut).scatter(0, order, cut), -torch.inf).log_softmax(-1)
    if params.min_p:
        least = kept.max() + torch.tensor(params.min_p).log()
        kept = kept.masked_fill(kept < least, -torch.inf).log_softmax(-1)
    generator = torch.Generator().manual_seed((params.seed or 0) + len(request.tokens))
    token = int(torch.multinomial(kept.exp(), 1, generator=generator))
    logprobs = kept if params.logprobs_mode == LogprobMode.PROCESSED else raw
    return token, float(logprobs[token])
