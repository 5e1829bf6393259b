"""What people see of a job, running or finished.

    jobs      which job is meant
    source    its records, from the journal's file      remote    or from a live master
    tokens    the secret such a master wants
    summary   the job on one page                       nodes     its nodes and workers
    failures  what went wrong, the cause first
    outputs   where each worker's output is             tail      lines of a file that still grows
    lines     the workers' output, over restarts        words     durations, moments, harmless texts

Nothing here changes a job, and nothing here knows of terminals: that is cli's part.
"""
