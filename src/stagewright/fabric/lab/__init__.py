"""A network of hosts on this machine: namespaces, a switch, rates, delays and losses; gone when it is left."""
