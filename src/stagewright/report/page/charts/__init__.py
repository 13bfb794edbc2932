"""The report page's charts, as SVG and as figure files."""
