"""Rewards: functions, models and judges, and their weighted sum."""
