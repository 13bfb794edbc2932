"""A temporary emulated network on this machine: network namespaces, a switch, rates, delays and packet loss."""
