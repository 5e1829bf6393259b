"""Where nodes come from, and how a node is kept from jobs: one file a platform, all behind the protocol of base.py."""
