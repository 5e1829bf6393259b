"""Node checks: what is measured on a node and between two, and the kinds of processors as plug-ins.

    accelerators/   one file a kind of processor: its devices, tasks, counters, communication, fault table
    measure.py      how long a task takes, and how long it waited for a processor
    stages.py       the stages of a node alone: devices, a multiplication, a copy, the disk

What follows from the measurements is decided in core/health/verdicts.py, and who is measured when in checkup.py there.
"""
