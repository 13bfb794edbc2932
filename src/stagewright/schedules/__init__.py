"""Pipeline schedules: their names and rules, and the order of actions on every worker."""
