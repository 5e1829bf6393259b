"""Snapshots on other nodes: copies, or parity in groups. The workers take no part in it.

    replication    this node's part: it sends its own to its partners, and holds those of its guests
    replicator     follows what is sealed here, and sends the newest to each partner
    guests         what is held for others; slots: two files for one image, one always whole
    bulk           the connection between two agents, for many bytes; blocks: cut, with checksums
    parity         the arithmetic of parity groups; parity_rounds, parity_store: making it and holding it
    rebuilding     a lost node's image, made again from its group's parity
"""
