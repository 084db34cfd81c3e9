"""Commands, replay and planner."""
