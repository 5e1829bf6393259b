"""What is said between processes and how: messages, the authenticated gRPC channel, the local socket."""
