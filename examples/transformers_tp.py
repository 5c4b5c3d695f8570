"""A model of transformers, split by its own plan over tp, trained with DDP over dp.

    meshdist run -n 4 examples/transformers_tp.py --check
    torchrun --nproc-per-node 4 examples/transformers_tp.py --model qwen3 --tp 4 --check
    python examples/transformers_tp.py --simulate 4 --tied --check      # in one process

The weights are random and small. ``--check`` trains the whole model on one rank as well, compares
losses, norms and weights, and exits with 1 if they differ. It needs transformers 5.
"""

import argparse
import sys

import torch
import transformers

import meshdist as md

CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
BATCH, LENGTH, STEPS = 12, 12, 3
LIMIT = 1e-5  # largest difference allowed: these models compute their norms in float32


def make_model(name: str, *, is_tied: bool) -> transformers.PreTrainedModel:
    """Return a small model; every rank draws it alike. The vocabulary does not divide."""
    config = CONFIGS[name](
        vocab_size=65,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        tie_word_embeddings=is_tied,
    )
    md.seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def train(mesh: md.DeviceMesh, name: str, *, is_tied: bool) -> tuple[torch.nn.Module, list[float]]:
    """Return the model behind some steps, and the loss and the norm of gradients of each."""
    model = make_model(name, is_tied=is_tied)
    md.parallelize(model, mesh["tp"], model.tp_plan)
    ddp = md.DDP(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    draws = torch.Generator().manual_seed(1)
    numbers = []
    for _ in range(STEPS):
        text = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), generator=draws)
        mine = md.shard(text, "b@dp s", mesh)
        optimizer.zero_grad()
        loss = ddp(input_ids=mine, labels=mine).loss
        loss.backward()
        norm = md.clip_grad_norm_(model.parameters(), 1.0, mesh=mesh)
        optimizer.step()
        mean = loss.detach().clone()
        md.all_reduce(mean, md.ReduceOp.AVG, mesh["dp"])
        numbers += [mean.item(), norm.item()]
    return model, numbers


def difference(
    mesh: md.DeviceMesh, found: tuple[torch.nn.Module, list[float]], **how: object
) -> float:
    """Return the largest difference from one rank, over numbers and weights, on all ranks."""
    alone = md.DeviceMesh("cpu", [[md.get_rank()]], mesh_dim_names=("dp", "tp"))
    (model, numbers), (whole, wanted) = found, train(alone, **how)
    off = [abs(a - b) for a, b in zip(numbers, wanted, strict=True)]
    for mine, all_of_it in zip(model.parameters(), whole.parameters(), strict=True):
        spec, part = md.typeof(mine).spec, all_of_it.detach()
        if spec is not None:
            part = md.shard(part, md.NamedSharding(mesh, md.P(*spec.partitions)))
        off.append((mine.detach() - part).abs().max().item())
    largest = torch.tensor(max(off), dtype=torch.float64)
    md.all_reduce(largest, md.ReduceOp.MAX)
    return largest.item()


def run(options: argparse.Namespace) -> int:
    """Make the mesh, train, and compare where that is asked for."""
    if md.get_world_size() % options.tp:
        raise SystemExit(f"--tp={options.tp} does not divide {md.get_world_size()} ranks")
    shape = md.get_world_size() // options.tp, options.tp
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    how = {"name": options.model, "is_tied": options.tied}
    found = train(mesh, **how)
    off = difference(mesh, found, **how) if options.check else 0.0
    if md.get_rank() == 0:
        print(f"dp={shape[0]}, tp={shape[1]}: losses", *(f"{loss:.6f}" for loss in found[1][::2]))
        if options.check:
            print(f"difference from one rank: {off:.1e}")
    return int(not off <= LIMIT)  # NaN, too


def main() -> int:
    """Read the command line, and run on the ranks that there are, or on simulated ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*CONFIGS], default="llama")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--tp", type=int, default=2, help="parts of each layer")
    parser.add_argument("--simulate", type=int, metavar="N", help="run N ranks in this process")
    parser.add_argument("--check", action="store_true", help="compare with one rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.simulate:
        return max(md.simulate(run, options.simulate, args=(options,)))
    md.init_process_group()
    outcome = run(options)
    md.destroy_process_group()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
