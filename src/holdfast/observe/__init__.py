"""What people see of a job, running or finished.

    jobs      which job is meant                       source    its records: from the journal's file,
    tokens    the secret for a live master             remote    or from a live master
    summary   the job on one page                      failures  what went wrong, the cause first
    outputs   where each worker's output is            tail      lines of a file that still grows
    output    the workers' output, over restarts

Nothing here changes a job, and nothing here knows of terminals: that is cli's part.
"""
