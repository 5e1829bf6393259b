"""Checkpoints at rest: bytes, files and stores. No torch: agents, which have none, read and write here too.

    pieces       what a tensor in an image is: name, dtype, shape, its place in the whole and in the file
    image        a part of a state as one run of bytes: in shared memory, in a file, on the way; what lies where
    header       the head of an image, which is that of a safetensors file: written, and read trusting nothing
    frames       what stands around each tensor, so that stock torch takes it for an archive of its own
    pickles      the two pickles that stock torch wants to find, written opcode by opcode
    objects      what a state holds beside its tensors, for stock torch
    sources      an image to read from, every block verified: memory, a file, or whatever reads a range of bytes

    stores       what a store can do, and which one a URL means
      directory    files written past the page cache, durable when `put` returns (direct)
      object_store s3://, gs://, az:// by obstore: multipart, retries (patience), conditional puts (credentials)
      filesystems  the rest, by fsspec
    shelves      how a checkpoint becomes visible in a store, and ceases to be, in one atomic move: directory_shelf
                 (locks), object_shelf (leases)
    manifest     what a checkpoint is, in JSON
    writing      one attempt at a checkpoint, by writers who do not talk to each other (blocks)
    catalogue    what there is: found, damaged, unfinished; opened, verified (verifying), pinned (tags)
    pruning      what is removed, and in which order
    retention    what to keep
    points       the named points of a save and of a removal, where tests kill

A half-written checkpoint is never seen; a damaged one is named and passed over for the one before; nothing is removed
but by `remove` and `prune`, and never what is being read or written, nor the last good one.
"""
