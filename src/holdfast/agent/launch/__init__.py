"""How the agent starts processes: by a fork server that it supervises, or by exec. The other side: worker/launch/."""
