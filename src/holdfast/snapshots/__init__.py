"""Images of the ranks' state between their capture by a worker and storage. Without torch; knows no agent.

    slot_file.py           the two buffers of a rank in shared memory, and the rule that keeps a complete step
    snapshot_store.py      this node's own images          replica_store.py     other nodes' images
    snapshot_manager.py    what an agent does with them    directories.py       where they are, and who owns them
    replication.py         copies on other nodes:          replicator.py        sends them
    transfer.py            the bulk port and its client    parity/              parity in place of copies
    uploader.py            from memory to storage          checksummer.py       computes checksums of images

What is known of one image is `ImageInfo` (core/image_info.py).
"""
