from tests.data.conftest import model_folder, tokenizer

__all__ = ["model_folder", "tokenizer"]
