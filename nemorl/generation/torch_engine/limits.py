"""What a request may ask of an engine."""

from dataclasses import dataclass

from nemorl.generation.errors import RequestRefused
from nemorl.generation.types import GenerationRequest


@dataclass(frozen=True)
class RequestLimits:
    """The limits beyond which a request could never be served."""

    vocab_size: int
    max_sequence_length: int  # tokens of prompt and completion
    max_kv_tokens: int
    can_decode: bool  # a tokenizer is there to look for stop strings

    def max_tokens(self, request: GenerationRequest) -> int:
        """Tokens the sequence may reach, prompt included."""
        return min(len(request.prompt) + request.max_new_tokens, self.max_sequence_length)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestRefused, with the limit that the request breaks."""
        prompt, name = request.prompt, f"request {request.id!r}"
        if len(prompt) == 0 or request.max_new_tokens < 1:
            raise RequestRefused(
                f"{name} has {len(prompt)} prompt tokens and max_new_tokens={request.max_new_tokens}; both"
                " must be at least 1"
            )
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise RequestRefused(
                f"{name} has token ids from {prompt.min()} to {prompt.max()}; the model's vocabulary has"
                f" {self.vocab_size}: is the tokenizer another model's?"
            )
        if len(prompt) >= self.max_sequence_length:
            raise RequestRefused(
                f"{name} has a prompt of {len(prompt)} tokens, which leaves nothing to sample below"
                f" policy.max_sequence_length={self.max_sequence_length}; shorten it or raise the limit"
            )
        if self.max_tokens(request) > self.max_kv_tokens:
            raise RequestRefused(
                f"{name} may grow to {self.max_tokens(request)} tokens, and the KV cache holds"
                f" generation.max_kv_tokens={self.max_kv_tokens}; raise it or lower max_new_tokens"
            )
        if request.stop_strings and not self.can_decode:
            raise RequestRefused(
                f"{name} has stop strings, and there is no tokenizer.json to decode with; save the tokenizer"
                " in the fast format or use stop_token_ids"
            )
