"""Public tables of measured training steps, as rows that the league compares with the forecast."""
