"""TensorRT-LLM as an engine: its arguments, its requests, and the way its workers are spoken to."""

from .engine import TrtllmEngine

__all__ = ["TrtllmEngine"]
