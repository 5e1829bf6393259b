"""Exact data: every sample once per epoch, at any world size, resumed anywhere at once.

    order       position → sample, a pure function          slots     the global batch → ranks, a pure function
    plan        both together: which samples a step has     cursor    how far it is committed: the state
    sampler     for torch's own DataLoader                  loader    with workers, prefetch and keyed randomness
    pipeline    the loader's workers                        ledger    what was used, as a chain of digests
    randomness  by sample and by slot, not by process       mixture   several datasets by weight, as one
    tokens      windows of a memory-mapped token file

All of it needs NumPy; order, slots, plan and ledger do without torch.
"""
