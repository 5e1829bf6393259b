"""How a worker is forked from a warm server, and runs a script as Python would have. The other side: agent/birth/."""
