"""How a node is excluded from jobs: one file a platform, all behind the protocol of platform.py."""
