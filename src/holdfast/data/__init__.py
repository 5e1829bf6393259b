"""Exact data: every sample once per epoch, at any world size, resumed anywhere at once.

    order       position → sample, a pure function          slots     the global batch → ranks, a pure function
    plan        both together: which samples a step has     cursor    how far it is committed: the state
    sampler     for torch's own DataLoader                  loader    with workers, prefetch and keyed randomness
    handing     what loader and stream have in common       ledger    what was used, as a chain of digests
    pipeline    batches fetched ahead, and kept             fetching  what the loader's workers do
    keeping     handed out, for a repeated step             packing   documents into windows, inside a slot
    randomness  by sample and by slot, not by process       mixture   several datasets by weight, as one
    tokens      windows of a memory-mapped token file       stream    shards read from front to back, leased
    catalogue   a stream's shards and their order           formats   records out of text, JSON, tar, Parquet
    drafts      which records a step of a stream has        reading   ahead of the loop, and again after a fault
    tree_sum    a sum over slots in one fixed order

All of it needs NumPy; order, slots, plan and ledger do without torch.
"""
