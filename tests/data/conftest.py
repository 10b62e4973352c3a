import pytest

from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import Tokenizer, load_tokenizer
from tests.data.tokenizers import save_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder) -> Tokenizer:
    return load_tokenizer(PolicyConfig(model_path=model_folder))
