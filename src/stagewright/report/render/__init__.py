"""Renderers of `stagewright.table.Table`: terminal, HTML and Markdown."""
