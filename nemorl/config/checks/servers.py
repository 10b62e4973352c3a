"""Servers that somebody else runs, and our own endpoint."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.auxiliary import EndpointTeacherConfig, TeacherConfig
from nemorl.config.endpoint import is_loopback
from nemorl.config.environment import RewardConfig, ServiceRewardBase
from nemorl.config.generation import GenerationConfig
from nemorl.config.generation_base import GenerationBase
from nemorl.config.generation_openai import OpenAIGenerationConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation


def samples_can_be_learnt(algorithm: AlgorithmConfig, generation: GenerationConfig) -> Iterator[Violation]:
    """What is learnt are tokens, with the logprobs at which they were sampled."""
    if not isinstance(generation, OpenAIGenerationConfig) or generation.token_ids:
        return
    if algorithm.online:
        mend = (
            "samples that come as text alone cannot be learnt from: take a server that returns token ids and "
            "logprobs (vLLM's, `nemorl serve`) and set it to true, or use this one with `nemorl eval`"
        )
        yield Violation("generation.token_ids", False, mend)


def servers_are_used_as_they_are(generation: GenerationConfig) -> Iterator[Violation]:
    """What speaks of an engine's weights, or of what text cannot carry, would do nothing."""
    if not isinstance(generation, OpenAIGenerationConfig):
        return
    ignored = dict.fromkeys(
        ("precision", "bucket_megabytes", "transport", "delta", "check_one_in"),
        "the server has weights of its own, and gets none",
    )
    if not generation.token_ids:
        ignored["stop_token_ids"] = "with generation.token_ids: false text alone goes to the server"
    for name, why in ignored.items():
        value = getattr(generation, name)
        if value != GenerationBase.model_fields[name].default:
            yield Violation(f"generation.{name}", value, f"{why}: remove this")


def server_address_is_whole(generation: GenerationConfig) -> Iterator[Violation]:
    """Requests go to paths below it."""
    if not isinstance(generation, OpenAIGenerationConfig):
        return
    url, mend = generation.base_url, None
    whole = url.startswith(("http://", "https://")) and generation.host and not re.search(r"\s", url)
    if not whole:
        mend = "an address such as http://127.0.0.1:8000/v1 is wanted"
    elif not urlsplit(url).path.strip("/"):
        mend = (
            f"requests would go to {url.rstrip('/')}/completions, which servers do not know: end it with /v1"
        )
    elif url.rstrip("/").endswith("/completions"):
        mend = "/completions is added to it with each request: let it end with /v1"
    if mend is not None:
        yield Violation("generation.base_url", url, mend)


def servers_are_reached_from_all_nodes(
    cluster: ClusterConfig,
    generation: GenerationConfig,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Violation]:
    """Workers ask them, and on another node a loopback address is another machine's."""
    if cluster.num_nodes == 1:
        return
    asked: dict[str, str] = {}
    if isinstance(generation, OpenAIGenerationConfig):
        asked["generation.base_url"] = generation.base_url
    for name, teacher in teachers.items():
        if isinstance(teacher, EndpointTeacherConfig):
            asked[f"teachers.{name}.base_url"] = teacher.base_url
    for place, reward in enumerate(rewards):
        if isinstance(reward, ServiceRewardBase):
            asked[f"rewards.{place}.url"] = reward.url
    for field, url in asked.items():
        if is_loopback(_host(url)):
            mend = (
                f"cluster.num_nodes is {cluster.num_nodes}, and on each of them this address is another "
                "machine: name the one by which all reach the server"
            )
            yield Violation(field, url, mend)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def endpoint_has_a_key(generation: GenerationConfig) -> Iterator[Violation]:
    """Who is reached from other machines does not make up the key."""
    endpoint = generation.endpoint
    if endpoint is not None and not endpoint.on_this_machine_only and endpoint.api_key_env is None:
        mend = (
            "other machines reach this address, so the key must be yours: name its environment variable in "
            "generation.endpoint.api_key_env, or listen on 127.0.0.1"
        )
        yield Violation("generation.endpoint.host", endpoint.host, mend)
