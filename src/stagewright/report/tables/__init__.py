"""Results as `stagewright.table.Table` values."""
