"""Model families: Hugging Face folders, their shapes, and where Megatron keeps each of their weights."""
