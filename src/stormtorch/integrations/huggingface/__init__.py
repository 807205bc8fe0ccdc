"""Trainers of Hugging Face's ``transformers`` and ``trl`` that stream their model: `StormTrainer`, `storm_trainer`."""

try:
    import accelerate  # type: ignore[import-untyped]  # noqa: F401
    import transformers  # noqa: F401
except ImportError as missing:
    raise ImportError(
        f"stormtorch.integrations.huggingface needs {missing.name}. Install it: pip install 'stormtorch[hf]'",
        name=missing.name,
    ) from missing

from .trainer import StormTrainer, storm_trainer

__all__ = ["StormTrainer", "storm_trainer"]
