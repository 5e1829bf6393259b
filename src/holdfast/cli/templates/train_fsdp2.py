"""Train a sharded model (FSDP2, fully_shard) under Holdfast.

    holdfast run --standalone --nproc-per-node 2 --spares 1 --checkpoint-dir checkpoints train.py

Kill a worker while it runs (`kill -9`): its shard comes from the copy in another worker's memory, the interrupted step
is repeated, and the run ends with the same bits. Start it again and it goes on from the last checkpoint, with any
number of workers. Replace what is marked with TODO. The same script runs under torchrun; then nothing is repaired.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import holdfast as hf

WORDS, CONTEXT = 256, 32


class CountingText(Dataset[tuple[Tensor, Tensor]]):
    """Sequences that count on from their first word. TODO: your dataset, with a length and numbered samples."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = (torch.arange(CONTEXT + 1) * (index % 7 + 1) + index) % WORDS
        return words[:-1], words[1:]


class SmallDecoder(nn.Module):
    """A transformer over words. TODO: your model; what is large in it is sharded layer by layer, below."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x.flatten(0, 1))  # one row for each word; FSDP2 warns of outputs that are views
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together, however many there are")
    arguments = parser.parse_args()

    job = hf.init()  # joins the job; torch.distributed is ready, and the process's own device is the current one
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = SmallDecoder().to(device)
    mesh = init_device_mesh(device.type, (job.world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after the model is sharded
    data = hf.Loader(CountingText(), global_batch_size=arguments.batch, seed=0)
    # Everything that makes up the state; here it is restored, if there is something to restore.
    job.track(model=model, optimizer=optimizer, data=data)

    def report() -> None:
        if job.rank == 0 and job.step % 20 == 0:
            print(f"step {job.step:5d}  loss {job.logged['loss']:.4f}", flush=True)

    for step in job.steps(arguments.steps):  # the steps that are left
        with step:  # what communicates or changes the state belongs in here: a fault repeats the step
            for words, following in step.batches(data):
                loss = cross_entropy(model(words.to(device)), following.to(device).flatten())
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
            step.after_commit(report)  # once for each step, when it is certain that it counts

    if job.rank == 0:
        print("trained", flush=True)


if __name__ == "__main__":
    main()
