"""Messages between processes, and the frames, handshake and TLS of their connections."""
