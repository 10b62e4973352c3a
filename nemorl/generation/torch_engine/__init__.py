"""The embedded engine: a compact decoder with a KV cache and continuous batching, in plain torch."""
