"""What kill_campaign.py kills, and how it judges what is left.

state       a state that is a function of the step and of the life that made it, so that any mixture shows
ranks       processes that train on it and snapshot it as a session does, exchanging votes through pipes
agents      processes that upload snapshots, or copy them to the next node, as an agent does
homes       which rank is on which node
memory      lives of ranks and agents, each ended by `kill -9`; what must be restorable then
writers     processes that write and remove checkpoints, killed at named points and at random moments
"""
