"""Checkpoints at rest: images, files and stores. No torch: agents, which have none, read and write here too.

An image, one rank's part of a state as one run of bytes:

    image.py         what lies where in it; pieces.py: what a tensor in it is
      header.py        its head, which is that of a safetensors file: written, and read trusting nothing
      frames.py        what stands around each tensor, so that stock torch takes it for an archive of its own
      pickles.py       the two pickles that stock torch wants to find, written opcode by opcode
      objects.py       what a state holds beside its tensors, for stock torch
    sources.py       an image to read from, every block verified: memory, a file, or whatever reads a range of bytes

Where images go:

    stores.py        what a store can do, and which one a URL means
      directory.py     files written past the page cache, durable when `put` returns (direct.py)
      object_store.py  s3://, gs://, az:// by obstore: multipart, retries (patience.py), conditional puts
      filesystems.py   the rest, by fsspec
    shelves.py       how a checkpoint becomes visible in a store, and ceases to be: in one atomic move
    manifest.py      what a checkpoint is, in JSON
    writing.py       one attempt at a checkpoint, by writers who do not talk to each other
    catalogue.py     what there is: found, damaged, unfinished; opened, verified, removed, pinned
    retention.py     what to keep; pruning.py: carrying it out
    points.py        the named points of a save

A half-written checkpoint is never seen; a damaged one is named and passed over for the one before; nothing is removed
but by `remove` and `prune`, and never what is being read or written, nor the last good one.
"""
