"""The processes of a run, started, connected and called by name: policy, generation, rollout."""
