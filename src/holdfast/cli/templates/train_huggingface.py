"""Fine-tune a Hugging Face model in a loop of your own under Holdfast. Needs `pip install transformers`.

    holdfast run --standalone --nproc-per-node 2 --spares 1 train.py

Kill a worker while it runs (`kill -9`): the interrupted step is repeated, and the run ends with the same bits. Replace
what is marked with TODO. The same script runs under torchrun, and alone with python; then nothing is repaired.
"""

import argparse

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, get_scheduler

import holdfast as hf

WORDS, CONTEXT = 256, 32


class TokenizedBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of token ids, as a tokenizer and a grouping step make them. TODO: a `datasets.Dataset` with these columns,
    after `.with_format("torch")`."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(CONTEXT) * (index % 7 + 1) + index) % WORDS
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def build_model() -> PreTrainedModel:
    """Return the model. TODO: `AutoModelForCausalLM.from_pretrained(name)`; this one is small and not downloaded."""
    shape = GPT2Config(
        vocab_size=WORDS,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="of all workers together, however many there are")
    arguments = parser.parse_args()

    job = hf.init()  # joins the job; torch.distributed is ready, and the process's own device is the current one
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model().to(device).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=5, num_training_steps=arguments.steps)
    data = hf.Loader(TokenizedBlocks(), global_batch_size=arguments.batch, seed=0)
    # Everything that makes up the state; here it is restored, if there is something to restore.
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)

    def report() -> None:
        if job.rank == 0 and job.step % 20 == 0:
            print(f"step {job.step:5d}  loss {job.logged['loss']:.4f}", flush=True)

    for step in job.steps(arguments.steps):  # the steps that are left
        with step:  # what communicates or changes the state belongs in here: a fault repeats the step
            for batch in step.batches(data):
                loss = model(**{name: column.to(device) for name, column in batch.items()}).loss
                step.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step.log(loss=loss)
            step.after_commit(report)  # once for each step, when it is certain that it counts

    if job.rank == 0:
        print("trained", flush=True)  # TODO: model.module.save_pretrained(directory)


if __name__ == "__main__":
    main()
