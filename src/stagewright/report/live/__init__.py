"""The live page: what every worker of a run does now, in a browser or in the terminal; it only reads."""
