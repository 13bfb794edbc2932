"""File formats that several packages share: atomic writes, strict TOML, keyed JSON caches, Chakra traces."""
