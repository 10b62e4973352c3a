"""What the policy is paid for: reward functions and their weighted sum."""
