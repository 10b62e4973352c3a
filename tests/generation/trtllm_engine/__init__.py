"""Tests over a stand-in of TensorRT-LLM; they share one replica."""
