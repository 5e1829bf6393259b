"""Checkpoints at rest: images, files and stores. No torch: agents, which do not import it, read and write here too.

An image, one rank's part of a state as one run of bytes:

    image.py            what lies where in it
    header.py           its head, which is that of a safetensors file, and its tensor entries; reading trusts nothing
    archive_frames.py   what surrounds each tensor, so that stock torch takes it for an archive of its own
    pickles.py          the two pickles that stock torch expects, written opcode by opcode
    non_tensors.py      the values of a state that are not tensors, for stock torch
    part_readers.py     a readable image, every block verified: in memory, in a file, or behind any ranged read
    coverage.py         which regions of a tensor no part has

Where images go:

    stores.py               what a store can do, and which one a URL means
    directory.py            files that are durable when `put` returns; direct_io.py writes past the page cache
    object_store.py         s3://, gs://, az:// by obstore: multipart, retries, conditional puts, AWS profiles
    fsspec_store.py         every other URL, by fsspec
    publish.py              how a checkpoint becomes visible in a store, and ceases to be: in one atomic move
    directory_publisher.py  the same for directories, with file locks (locks.py)
    object_publisher.py     the same for object stores, with leases (object_locks.py)
    manifest.py             what a checkpoint is, in JSON
    checkpoint_writer.py    one attempt at a checkpoint, by writers that do not communicate
    checkpoint_catalogue.py the checkpoints of a store: found, damaged, unfinished; opened, verified, removed, pinned
    verify.py               every block compared with its checksum
    retention.py            which checkpoints to keep; prune.py removes the others
    failpoints.py           the named points of a save, where tests end the process

One meaning each: a *shard* is what model parallelism gives a rank; the ranks that have the same shard each write a
*share* of it; a *part* is the image of one share, number = shard + share × shards; a *region* is a range of rows of a
tensor; a *block* is 8 MiB of an image, with one checksum (util/blocks.py).

A half-written checkpoint is never seen; a damaged one is reported and skipped for the one before; nothing is removed
except by `remove` and `prune`, and never what is being read or written, nor the last good one.
"""
