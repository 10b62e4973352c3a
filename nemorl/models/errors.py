"""What can be wrong with a model folder."""


class UnsupportedModel(ValueError):
    """The model is sound, but something in its config.json is not implemented here."""


class BrokenModelFolder(ValueError):
    """The folder is not a complete Hugging Face model: a file, a field or a tensor is missing or wrong."""
