"""Checks of nodes, and which machines are trusted. Pure.

checkup       when a check is due, which nodes are checked after which fault, and what follows from a check
check_rounds  the rounds of a check under way
tournament    which nodes are measured next, alone or in which pairs
findings      tasks, results and verdicts as data
verdicts      the way from results to verdicts
reputation    what to expect of a machine, from its history across jobs
"""
