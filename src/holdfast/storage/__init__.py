"""Where checkpoints go: directories, object stores, whatever fsspec knows. No torch in here.

    stores.py        what a store can do, and which one a URL means
      directory.py     files written past the page cache, durable when `put` returns (direct.py)
      objects.py       s3://, gs://, az:// by obstore: multipart, retries (patience.py), conditional puts
      filesystems.py   the rest, by fsspec
    shelves.py       how a checkpoint becomes visible in a store, and ceases to be: in one atomic move
    manifest.py      what a checkpoint is, in JSON
    writing.py       one attempt at a checkpoint, by writers who do not talk to each other
    catalogue.py     what there is: found, damaged, unfinished; opened, verified, removed, pinned
    retention.py     what to keep
    points.py        the named points of a save
    image.py         a part's layout; pickles.py: what stock readers want beside it

A half-written checkpoint is never seen; a damaged one is named and passed over for the one before; nothing is removed
but by `remove` and `prune`, and never what is being read or written, nor the last good one.
"""
