"""The OpenAI-compatible HTTP endpoint over a pool of engines."""
