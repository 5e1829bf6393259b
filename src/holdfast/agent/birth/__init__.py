"""How the agent starts processes: by a fork server that is kept alive, or by exec. The other side: worker/birth/."""
