"""Suggestions for a setting that does not exist: by names of other programs, then by similar names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Names of each setting in transformers, trl, axolotl, LLaMA-Factory, Lightning and nanoGPT. difflib finds similar ones.
_ELSEWHERE = {
    "model": "model_name_or_path model_name model_path base_model pretrained pretrained_model_name_or_path checkpoint",
    "tokenizer": "tokenizer_name_or_path tokenizer_path",
    "loss": "loss_fn criterion",
    "vram": "gpu_memory max_memory max_gpu_memory gpu_mem device_memory",
    "ram": "cpu_memory max_cpu_memory host_memory memory",
    "device": "gpu cuda accelerator device_map devices",
    "dtype": "precision fp16 fp32",
    "chunked_loss": "use_liger_kernel liger cut_cross_entropy",
    "activations": "gradient_checkpointing activation_checkpointing",
    "data": (
        "dataset datasets dataset_name dataset_path train_file train_files train_data train_dataset data_path "
        "data_files data_dir input"
    ),
    "format": "dataset_type data_format",
    "text_field": "dataset_text_field text_column",
    "sequence": "max_seq_len max_length block_size ctx cutoff_len model_max_length",
    "packing": "sample_packing",
    "completions_only": "train_on_inputs train_on_responses_only assistant_only_loss mask_prompt",
    "batch": "batch_size train_batch_size micro_bs bs",
    "accumulate": "gradient_accumulation accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches",
    "epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "steps": "max_steps num_steps num_train_steps total_steps max_iters iters iterations train_steps n_steps",
    "optimizer": "opt",
    "lr": "learning_rate max_lr base_lr",
    "schedule": "lr_schedule",
    "warmup": "warmup_steps lr_warmup_steps num_warmup_steps warmup_iters",
    "weight_decay": "wd decay",
    "betas": "beta1 beta2",
    "eps": "epsilon",
    "clip": "grad_clip gradient_clipping grad_norm",
    "seed": "data_seed",
    "lora_rank": "lora_r r lora use_lora lora_dim peft",
    "lora_dropout": "dropout",
    "lora_targets": "lora_target lora_modules",
    "output": "out out_dir save_dir output_path",
    "resume": "resume_from_checkpoint",
    "save_every": "save_steps save_interval checkpoint_every save_strategy save_freq",
    "keep": "save_total_limit keep_checkpoints max_checkpoints",
    "save_optimizer": "save_only_model",
    "log_every": "logging_steps log_interval log_steps",
    "tensorboard": "report_to log_with logger tracker",
    "eval_data": "eval_dataset validation_file val_data valid_data eval_file test_data validation_data val_file",
    "eval_every": "eval_steps eval_interval val_check_interval evaluation_strategy eval_strategy",
    "eval_batches": "eval_iters max_eval_samples",
    "sample_prompts": "prompts prompt",
    "sample_tokens": "max_new_tokens",
}
_SETTINGS = {other: name for name, others in _ELSEWHERE.items() for other in others.split()}
_NO_WANDB = "All numbers are in metrics.jsonl in --output, and --tensorboard writes TensorBoard files too."
_ONE_GPU = "STORM trains on one GPU, and streams a model that does not fit: leave it out."
_NO_BITS = "STORM does not train quantised weights: --lora-rank 16 trains adapters on bf16 weights."
_INSTEAD = {
    **dict.fromkeys(("wandb", "use_wandb", "wandb_project", "wandb_entity", "mlflow", "comet"), _NO_WANDB),
    **dict.fromkeys(("fsdp", "deepspeed", "ddp", "nproc_per_node", "num_gpus", "world_size"), _ONE_GPU),
    "gradient_checkpointing": "STORM chooses by itself; --activations recompute always recomputes.",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "qlora", "quantization"), _NO_BITS),
    "trust_remote_code": "STORM never runs code in a model's folder: leave it out.",
    "push_to_hub": "A checkpoint is a folder that hf upload accepts.",
}


def suggestion(given: str, names: Iterable[str], *, flags: bool) -> str:
    """A sentence with the setting to use instead of ``given``, as flag or key; "" if no name is similar."""
    word, known = given.lstrip("-").replace("-", "_").lower(), list(names)
    if word in _INSTEAD and "lr" in known:  # storm train; other commands have no such settings
        return _INSTEAD[word]
    if word in known or _SETTINGS.get(word) in known:
        near = [word if word in known else _SETTINGS[word]]
    else:
        alike = difflib.get_close_matches(word, [*known, *(n for n in _SETTINGS if _SETTINGS[n] in known)], n=6)
        near = list(dict.fromkeys(_SETTINGS.get(name, name) for name in alike))[:3]
    shown = [f"--{name.replace('_', '-')}" if flags else name for name in near]
    return f"Did you mean {' or '.join(shown)}?" if shown else ""
