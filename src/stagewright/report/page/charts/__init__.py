"""Charts of the report page, as SVG and as matplotlib figures."""
