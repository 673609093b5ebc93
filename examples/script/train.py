"""Train a small residual network on scikit-learn's digits with torchrun, as torchvision's reference scripts do.

    torchrun --nproc-per-node 2 train.py --epochs 5 --output-dir out

The calls of ``trivet.run`` are all that is Trivet's. Elsewhere they print, and the script runs without the service.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from network import small_resnet
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trivet import run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--lr-step-size", type=int, default=30)
    parser.add_argument("--lr-gamma", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return samples to learn from, and held-out ones."""
    pictures, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pictures / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    return TensorDataset(inputs[300:], targets[300:]), TensorDataset(inputs[:300], targets[:300])


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the share of samples that are classified rightly."""
    model.eval()
    inputs, targets = (tensor.to(device) for tensor in data.tensors)
    return (model(inputs).argmax(1) == targets).float().mean().item()


def train_epoch(model: nn.Module, batches: DataLoader[tuple[Tensor, ...]], optimizer: torch.optim.Optimizer) -> float:
    """Return the mean loss."""
    model.train()
    device, losses = next(model.parameters()).device, []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def somebody_stops(device: torch.device) -> bool:
    """Whether the job is to stop; all ranks decide the same."""
    told = torch.tensor(float(run.stopping()), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    learned, held_out = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(learned)
    batches = DataLoader(learned, args.batch_size, sampler=sampler)
    model = DistributedDataParallel(small_resnet(args.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, args.lr_gamma)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    begun, saved = 0, run.checkpoint_dir() / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        begun = state["epoch"]
    for epoch in range(begun, args.epochs):
        if somebody_stops(device):
            break
        sampler.set_epoch(epoch)
        loss = train_epoch(model, batches, optimizer)
        schedule.step()
        accuracy = evaluate(model.module, held_out, device)
        run.metric(epoch + 1, loss=loss, accuracy=accuracy)
        run.progress(epoch + 1, args.epochs, "epochs")
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}")
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch + 1}, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)
    if dist.get_rank() == 0:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), args.output_dir / "model.pt")


def main() -> None:
    args = arguments()
    cuda, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl" if cuda else "gloo")
    train(args, torch.device("cuda", local) if cuda else torch.device("cpu"))
    # After the model: with gloo, torch may wait for ever for the group's thread if a DDP model is the last to hold it.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
