"""A session of one of the variations, which can hurt itself.

    varied.py NAME STEPS [--fault POINT:STEP:RANK:ACTION]… [--spares]

NAME is a function of the package `variations`. POINT and ACTION are explained there, in `bench.py`, with the files that
it writes to WORK.
"""

import argparse
import faulthandler
import signal

import torch
from variations import ALL
from variations.bench import Bench

faulthandler.register(signal.SIGUSR2)  # so that a person can ask where it is
torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("name", choices=sorted(ALL))
parser.add_argument("steps", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--spares", action="store_true", help="no fault before a spare is parked")
arguments = parser.parse_args()
Bench(arguments.steps, arguments.fault, has_spares=arguments.spares).train(ALL[arguments.name])
