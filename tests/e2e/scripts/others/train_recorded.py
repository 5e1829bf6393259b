"""As torchrun's documentation recommends: the entry point under @record."""

import os
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main(arguments):
    dist.init_process_group(backend="gloo")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (dist.get_rank(), os.environ["LOCAL_RANK"], arguments))
    if dist.get_rank() == 0:
        print(everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
