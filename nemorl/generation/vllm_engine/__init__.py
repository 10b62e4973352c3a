"""vLLM. `worker`, `trace` and `weights` run in its worker processes; nothing of it is imported before."""
