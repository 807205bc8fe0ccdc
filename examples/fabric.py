"""A loop of Lightning Fabric, in less device memory than the model has weights.

    pip install lightning-fabric
    python examples/fabric.py

An ordinary loop of Fabric, with accumulation, clipping and a checkpoint: the two lines that are STORM's are marked. It
trains a small network on made-up data, on the GPU if there is one, in seconds.
"""

from __future__ import annotations

import argparse

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stormtorch as storm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--accelerator", default="auto")
parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed", "bf16-true"])
parser.add_argument("--vram", default="400KiB", help="for 524 KiB of weights in fp32")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", default="fabric.ckpt")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


fabric = Fabric(accelerator=options.accelerator, devices=1, precision=options.precision)
fabric.seed_everything(0, verbose=False)
model = nn.Sequential(*(Block() for _ in range(8)), nn.Linear(64, 8))
if options.precision == "bf16-true":
    model.bfloat16()  # before it is streamed: Fabric finds nothing left to convert then
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

session = storm.stream(model, optimizer, vram=options.vram, device=fabric.device)  # the new line
model, optimizer = fabric.setup(model, optimizer, move_to_device=False)  # was: fabric.setup(model, optimizer)

x = torch.randn(options.steps * 4 * 16, 64)
rows = DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=16, shuffle=True)
for number, (inputs, labels) in enumerate(fabric.setup_dataloaders(rows), 1):
    last = number % 4 == 0  # of four micro-batches
    with fabric.no_backward_sync(model, enabled=not last):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        fabric.backward(loss / 4)
    if last:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)  # session.clip_grad_norm_(1.0) would not wait
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        fabric.print(f"step {number // 4}/{options.steps}  loss {loss.item():.4f}")

# A large model rather by session.save(folder, also={"scheduler": scheduler}): Fabric makes the whole file in RAM first.
fabric.save(options.output, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
print(session.report())
session.close()  # the model is ordinary again
