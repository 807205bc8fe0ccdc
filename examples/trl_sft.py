"""LoRA of a chat model with TRL's ``SFTTrainer``, in less VRAM than it has weights; loss on the answers only.

    python examples/trl_sft.py --model FOLDER --data chats.jsonl --vram 8GiB

An ordinary script of TRL: the one line that is STORM's is marked. ``data`` has lines like
{"prompt": [{"role": "user", "content": "..."}], "completion": [{"role": "assistant", "content": "..."}]}.
With ``--cpu`` it shows in less than a minute that it works: a few steps, on short rows, in fp32.
"""

from __future__ import annotations

import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from stormtorch.integrations.huggingface import storm_trainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", default="run")
parser.add_argument("--vram", default="auto")
parser.add_argument("--steps", type=int, help="default: three passes over the data; with --cpu 3")
parser.add_argument("--sequence", type=int, help="default: 1024; with --cpu 128")
parser.add_argument("--cpu", action="store_true")
options = parser.parse_args()
steps = options.steps or (3 if options.cpu else -1)
sequence = options.sequence or (128 if options.cpu else 1024)
dtype = "float32" if options.cpu else "bfloat16"  # few CPUs are fast with bf16

arguments = SFTConfig(
    output_dir=options.output,
    model_init_kwargs={"dtype": dtype},
    max_length=sequence,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    learning_rate=1e-4,
    max_steps=steps,
    logging_steps=1,
    save_steps=100,
    gradient_checkpointing=False,  # STORM chooses for each block: keep, move or compute again
    use_cpu=options.cpu,
    report_to=[],
)
trainer = storm_trainer(SFTTrainer)(  # instead of SFTTrainer
    model=options.model,
    args=arguments,
    train_dataset=load_dataset("json", data_files=options.data, split="train"),
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
    storm={"vram": options.vram},
)
trainer.train()
trainer.save_model()
print(trainer.storm_report)
