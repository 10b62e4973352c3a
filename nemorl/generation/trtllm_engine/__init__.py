"""TensorRT-LLM as an engine. Importing the package does not import TensorRT-LLM."""
