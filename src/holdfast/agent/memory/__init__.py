"""The workers' states in this node's memory, and their way to storage. What other nodes hold of them: replicas/."""
