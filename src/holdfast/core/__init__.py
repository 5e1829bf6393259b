"""The job as data, and what to do about each event. Pure: no I/O, no clock, no randomness, no torch.

    events    what happened, as agents and clocks report it
    decide    event  -> records: the facts to be kept
    conclude  state  -> records: what follows from them (the policy)
    evolve    record -> state: the only mutation; invariants are checked after it
    orders    record -> what agents must now do

`transact` ties them together for a driver: the master in production, a loop in tests and simulation.
"""
