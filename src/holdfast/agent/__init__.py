"""One process a node: owns the node's workers and speaks for them to the master. Never imports torch."""
