"""The state beyond this process: snapshots, checkpoints, copies in other ranks, and the way back from them."""
