"""Full fine-tuning of a causal language model with the ``Trainer`` of transformers, in less VRAM than it has weights.

    python examples/hf_trainer.py --model FOLDER --data text.jsonl --vram 8GiB

An ordinary script of transformers: the one line that is STORM's is marked. ``data`` has lines like {"text": "..."}.
With ``--cpu`` it shows in less than a minute that it works: a few steps, on short rows, in fp32.
"""

from __future__ import annotations

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from stormtorch.integrations.huggingface import StormTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", default="run")
parser.add_argument("--vram", default="auto")
parser.add_argument("--steps", type=int, help="default: one pass over the data; with --cpu 3")
parser.add_argument("--sequence", type=int, help="default: 1024; with --cpu 128")
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
steps = options.steps or (3 if options.cpu else -1)
sequence = options.sequence or (128 if options.cpu else 1024)
dtype = "float32" if options.cpu else "bfloat16"  # in bf16 STORM keeps fp32 masters; few CPUs are fast with it

tokenizer = AutoTokenizer.from_pretrained(options.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)  # in RAM

rows = load_dataset("json", data_files=options.data, split="train")
rows = rows.map(
    lambda row: tokenizer(row["text"], truncation=True, max_length=sequence), remove_columns=rows.column_names
)

arguments = TrainingArguments(
    output_dir=options.output,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_grad_norm=1.0,
    learning_rate=1e-5,
    lr_scheduler_type="cosine",
    warmup_steps=0.03,
    num_train_epochs=1,
    max_steps=steps,
    logging_steps=1,
    save_steps=100,
    save_total_limit=2,
    use_cpu=options.cpu,
    report_to=[],
)
trainer = StormTrainer(  # instead of Trainer
    model=model,
    args=arguments,
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
    storm={"vram": options.vram},
)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model()
print(trainer.storm_report)
