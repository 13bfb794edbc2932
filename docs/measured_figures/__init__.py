"""Benchmark figures for the pages, one module per page: records in docs/measured go in, Markdown comes out."""
