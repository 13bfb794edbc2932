"""Who slows a job down: a what-if analysis of its recorded operations, rank by rank, stage by stage, link by link."""
