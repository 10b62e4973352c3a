"""A model server of NeMo-Gym for runs of nemorl: each request goes to the endpoint of its own episode.

nemorl puts the address and the key of the episode's endpoint into the metadata of a row, and agents pass the
parameters of a row on with every call of the model. Run by NeMo-Gym in its own Python environment
(docs/environment_servers.md).
"""

from typing import Any

from fastapi import Request
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig


class NemorlModelConfig(VLLMModelConfig):
    base_url: str = ""  # of a request
    api_key: str = ""  # of a request
    model: str = "policy"
    return_token_id_information: bool = False  # the endpoint records them
    uses_reasoning_parser: bool = True
    replace_developer_role_with_system: bool = True


class NemorlModel(VLLMModel):
    config: NemorlModelConfig

    def _preprocess_chat_completion_create_params(
        self, request: Request, body_dict: dict[str, Any]
    ) -> dict[str, Any]:
        body = super()._preprocess_chat_completion_create_params(request, body_dict)
        metadata = body.pop("metadata")
        url, key = metadata["nemorl_base_url"], metadata["nemorl_api_key"]
        request.state.nemorl_client = NeMoGymAsyncOpenAI(base_url=url, api_key=key)
        return body

    def _resolve_client(self, request: Request) -> NeMoGymAsyncOpenAI:
        return request.state.nemorl_client


if __name__ == "__main__":
    NemorlModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = NemorlModel.run_webserver()
