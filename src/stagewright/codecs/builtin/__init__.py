"""Built-in codecs, one file per kind; `codecs.catalog` lists them."""
