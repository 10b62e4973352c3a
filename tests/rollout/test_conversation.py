"""A conversation of several turns with the real engine, recomputed by one forward pass over all of it."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemorl.config.generation import TorchGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.generation.router import Replica, Router
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import EngineOptions, SamplingParams
from nemorl.rollout.turn_loop import SampleKey, Sampler, TurnLimits, TurnLoop
from nemorl.trajectories import Action, Message, Step, Task
from tests.data.tokenizers import IM_END, save_tokenizer

TEMPERATURE, TURNS = 0.8, 3


class AsksAgain:
    """Answers every turn but the last with another question."""

    def __init__(self) -> None:
        self.heard: list[Action] = []

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    async def step(self, action: Action) -> Step:
        self.heard.append(action)
        if len(self.heard) == TURNS:
            return Step(rewards={"patience": 1.0})
        return Step(messages=(Message("tool", f"12 and ab {len(self.heard)}"),), done=False)

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A random model that ends turns often, so that conversations continue."""
    folder = tmp_path_factory.mktemp("chat_model")
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=IM_END,
            tie_word_embeddings=False,
            initializer_range=0.3,
        )
    )
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("sample", range(3))
def test_tokens_mask_and_logprobs_equal_one_forward_pass(chat_model, tmp_path, sample):
    tokenizer_folder = save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(PolicyConfig(model_path=tokenizer_folder))
    environment = AsksAgain()

    async def converse():
        engine = TorchHost(
            TorchGenerationConfig(max_new_tokens=200),
            EngineOptions(chat_model, tokenizer_folder, 512, threads=1, commit_seconds=60),
        )
        limits = TurnLimits(
            max_sequence_length=512,
            max_new_tokens=200,
            stop_token_ids=frozenset(tokenizer.end_token_ids),
            stop_strings=("a", "e", "1", "\n"),  # a random model rarely says its end token
            generation_seconds=60,
            environment_seconds=10,
        )
        router = Router([Replica("torch", engine.generate_batches)])
        loop = TurnLoop(Sampler(router, tokenizer, prompts_of(tokenizer, True), limits))
        task = Task(0, (Message("user", "Say ab or 12."),))
        try:
            return await loop.run(
                task, environment, SampleKey(7, 0, sample, False), SamplingParams(TEMPERATURE)
            )
        finally:
            engine.close()

    (conversation,) = asyncio.run(converse())
    trajectory = conversation.trajectory
    assert trajectory.error is None
    assert len(trajectory.turns) == TURNS

    # The mask is where the turns lie, and there lie the very tokens that the environment received.
    mask = np.zeros(trajectory.num_tokens, dtype=bool)
    for turn, action in zip(trajectory.turns, environment.heard, strict=True):
        mask[turn.start : turn.end] = True
        assert trajectory.tokens[turn.start : turn.end].tolist() == action.tokens.tolist()
    assert trajectory.loss_mask.tolist() == mask.tolist()
    assert (trajectory.versions[mask] == 0).all()
    assert (trajectory.versions[~mask] == -1).all()

    model = LlamaForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens[None]).logits[0] / TEMPERATURE, dim=-1)
    recomputed = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0].numpy()
    assert trajectory.logprobs[1:][mask[1:]] == pytest.approx(recomputed[mask[1:]], abs=1e-4)
    assert (trajectory.logprobs[~mask] == 0).all()
