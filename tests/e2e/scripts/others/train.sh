#!/bin/sh
# Sets something up and then execs what a user would call.
set -eu
echo "rank $RANK of $WORLD_SIZE says $1 $2"
if [ "$RANK" = 1 ]; then
    sleep 0.1
fi
exec test "$LOCAL_RANK" -lt "$LOCAL_WORLD_SIZE"
