"""What the policy acts in: one file per environment."""
