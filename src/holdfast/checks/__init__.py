"""Node checks: what is measured on a node and between two, and the kinds of processors as plug-ins.

    accelerators/   one file a kind of processor: its devices, tasks, counters, communication, fault table
    measuring.py    how long a piece of work takes, in blocks
    waiting.py      how long others had the processors meanwhile
    stages.py       the stages of a node alone
    disk.py         one of them

What follows from the measurements is decided in core/health/verdicts.py, and who is measured when in checkup.py there.
"""
