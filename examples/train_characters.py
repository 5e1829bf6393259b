"""A small character-level transformer, trained with plain DistributedDataParallel. It does not import Holdfast:
`torchrun --nproc-per-node 2 examples/train_characters.py README.md` runs it as well.

It writes a checkpoint of its own every few steps and resumes from it, as most scripts do.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 64


class CharacterModel(nn.Module):
    """Two transformer layers over characters."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.symbols = nn.Embedding(characters, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.symbols(text) + self.positions(torch.arange(length))
        return self.head(self.layers(x, mask=mask, is_causal=True))


def read_text(paths: list[Path]) -> tuple[torch.Tensor, list[str]]:
    text = "".join(path.read_text() for path in paths)
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([number[character] for character in text]), alphabet


def batch(text: torch.Tensor, step: int, rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator).tolist()
    inputs = torch.stack([text[start : start + CONTEXT] for start in starts])
    targets = torch.stack([text[start + 1 : start + CONTEXT + 1] for start in starts])
    return inputs, targets


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("characters.pt"))
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("text", type=Path, nargs="+")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()  # after the model: DDP must not outlive a gloo group


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    text, alphabet = read_text(args.text)
    model = DistributedDataParallel(CharacterModel(len(alphabet)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    if rank == 0:
        print(f"training from step {first} with {dist.get_world_size()} workers", flush=True)

    for step in range(first, args.steps):
        inputs, targets = batch(text, step, rank)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.every == 0 and rank == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}", flush=True)
            save(args.checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})


def save(path: Path, state: dict) -> None:
    draft = path.with_suffix(".draft")
    torch.save(state, draft)
    os.replace(draft, path)


if __name__ == "__main__":
    main()
