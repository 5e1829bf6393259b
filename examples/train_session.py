"""The character model again, with a session: after a fault only the interrupted step is repeated.

    holdfast run --standalone --nproc-per-node 2 --spares 1 examples/train_session.py --steps 200 README.md

Compare it with train_characters.py: five lines were added (marked), and the checkpoint code was removed. It also runs
with torchrun, or with python alone; then there is no recovery.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from train_characters import CONTEXT, CharacterModel, read_text

import holdfast as hf


class Windows(torch.utils.data.Dataset):
    """Windows of the text, each with the same window one character later as its target."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * CONTEXT
        return self.text[start : start + CONTEXT], self.text[start + 1 : start + CONTEXT + 1]


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.state_dict().values():
        found.update(parameter.numpy().tobytes())
    return found.hexdigest()[:16]


def report(job: hf.Job) -> None:
    if job.rank == 0 and job.step % 20 == 0:
        print(f"step {job.step:4d}  loss {job.logged['loss']:.3f}  view {job.view}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--result", type=Path, help="where rank 0 writes a digest of the trained parameters")
    parser.add_argument("text", type=Path, nargs="+")
    args = parser.parse_args()

    job = hf.init()  # joins the job; torch.distributed is ready
    torch.manual_seed(0)
    text, alphabet = read_text(args.text)
    model = DistributedDataParallel(CharacterModel(len(alphabet)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = hf.Loader(Windows(text), global_batch_size=32, seed=0)
    job.track(model=model, optimizer=optimizer, data=data)  # the state that is saved and restored

    for step in job.steps(args.steps):  # the steps that are left
        with step:  # a fault in here repeats the step
            for x, y in step.batches(data):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
            step.after_commit(lambda: report(job))  # runs once, when the step is committed

    if job.rank == 0:
        print(f"trained: {digest(model)}", flush=True)
        if args.result:
            args.result.write_text(digest(model))


if __name__ == "__main__":
    main()
