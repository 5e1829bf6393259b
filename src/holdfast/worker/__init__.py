"""The user's process: the session, the step transaction, the line to the agent; and what a script imports."""
