"""Pipeline schedules: their names and rules, and each worker's order of actions."""
