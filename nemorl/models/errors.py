"""Errors of model folders."""

from nemorl.errors import NemorlError


class UnsupportedModel(NemorlError, ValueError):
    """The model is sound, but something in its config.json is not implemented here."""


class BrokenModelFolder(NemorlError, ValueError):
    """The folder is not a complete Hugging Face model: a file, a field or a tensor is missing or wrong."""
