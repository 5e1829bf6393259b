"""Checks of nodes, and which machines are trusted. Pure.

    checkup       when a check is due, and what follows from it; check_rounds: the rounds of one under way
    tournament    who is measured next, alone or in which pairs
    findings      what is measured and found, as data; verdicts: the one from the other
    suspects      who is examined after which fault
    reputation    what is to be expected of a machine, from what is known of it across jobs
"""
