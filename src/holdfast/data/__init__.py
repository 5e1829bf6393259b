"""Exact data: every sample once per epoch, at any world size, resumed anywhere at once.

    order.py            position → sample, a pure function
    slots.py            the global batch → ranks, a pure function
    step_plan.py        both together: which samples a step has
    data_coordinates.py which ranks are given the same batches
    cursor.py           how far it is committed: the state; and the steps that are skipped
    sampler.py          for torch's own DataLoader
    batch_source.py     what loader and stream have in common
    loader.py           a loader with workers, prefetch and keyed randomness
    pipeline.py         batches fetched ahead, and those handed out, for a repeated step
    worker_dataset.py   what the loader's workers do
    randomness.py       random generators set by sample and by slot, not by process
    sample_digest.py    what was used, as a chain of digests
    stream.py           shards read from front to back, leased to slots
    stream_step.py      which records a step of a stream has
    shard_catalogue.py  a stream's shards and their order
    shard_reader.py     records read ahead of the loop, and again after a fault
    formats.py          records out of text, JSON, tar, Parquet
    mixture.py          several datasets by weight, as one
    packing.py          documents packed into windows, inside a slot
    token_files.py      windows of a memory-mapped token file

All of it needs NumPy; order, slots, step_plan and sample_digest do without torch.
"""
