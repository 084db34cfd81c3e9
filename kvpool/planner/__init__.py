"""The capacity planner."""
