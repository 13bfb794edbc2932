"""Run a study: load its options, run its parts, write its folder and page."""
