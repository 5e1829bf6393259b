"""What people see of a job, running or finished.

    jobs                 finds the journal of the job that is meant
    stored_jobs          all jobs of a state directory, and what they take on disk
    source               reads its records from the journal's file; remote: from a live master
    token_file           finds the token that a live master wants
    summary              the job on one page; node_summary: its nodes and workers
    failures             the failures of workers, the root cause first
    incident_report      one incident: cause, stacks, decisions, timeline
    sample_audit_report  whether the committed steps used the samples they should have used
    log_locations        where each worker's log files are; log_reader: their lines, over restarts
    formatting           times, durations, ranks, text without control characters

Nothing here changes a job, and nothing here knows of terminals: that is cli's part.
"""
