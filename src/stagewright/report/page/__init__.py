"""The report page: run folders in, plain values in between, one HTML file out.

folders ─► runs (RunData) ─► sections (Section: prose, tables, charts) ─► html | markdown | figures
"""

from __future__ import annotations

from stagewright.report.page.build import Report, build_report
from stagewright.report.page.html import page_html
from stagewright.report.page.markdown import page_markdown
from stagewright.report.page.sections import BarChart, Code, LineChart, Page, Picture, Prose, Section

__all__ = [
    "BarChart",
    "Code",
    "LineChart",
    "Page",
    "Picture",
    "Prose",
    "Report",
    "Section",
    "build_report",
    "page_html",
    "page_markdown",
]
