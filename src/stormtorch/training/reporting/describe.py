"""Describes a run before it starts: the model, the schedule, and the placement."""

from __future__ import annotations

from torch import nn

from ...core.budget import Budget
from ...core.sizes import format_bytes
from ...core.tags import Tier
from ...session.api import Session
from ..settings.schedule import warmup_steps
from ..settings.train_settings import TrainSettings


def describe_model(model: nn.Module, origin: str) -> str:
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size = sum(parameter.nbytes for parameter in parameters)
    dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    share = "all of them trained" if trained == count else f"{trained:,} of them trained"
    return (
        f"model      {type(model).__name__}: {count:,} parameters, {share}; {format_bytes(size)} ({dtypes}), {origin}"
    )


def describe_schedule(settings: TrainSettings, total: int, rows: int) -> str:
    batch = settings.batch * settings.accumulate
    passes = total * batch / rows
    warmup = warmup_steps(settings, total)
    clipped = f"clipped at {settings.clip:g}" if settings.clip else "not clipped"
    return (
        f"schedule   {_counted(total, 'step')} of {_counted(batch, 'row')} ({batch * settings.sequence:,} tokens), "
        f"{passes:.2f} passes over the data; lr {settings.lr:g}, {settings.schedule}, "
        f"{_counted(warmup, 'step')} of warm-up; {settings.optimizer}, {clipped}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def describe_placement(session: Session) -> list[str]:
    """Each tier with its budget and its present use."""
    ledger, plan = session.ledger, session.plan
    device = _limit(ledger.budgets[Tier.DEVICE])
    if session.device.type == "cpu":  # a part of the RAM, without room for a driver
        budget = ledger.budgets[Tier.DEVICE]
        device = f"whose memory is RAM too, at most {format_bytes(budget.limit_bytes)} of it ({budget.given})"
    balances = [line for line in ledger.balances() if line.tier is Tier.HOST and line.used_bytes]
    used = [f"{line.tag.value} {format_bytes(line.used_bytes)}" for line in balances]
    lines = [
        f"device     {session.device}, {device}: {format_bytes(plan.pool.pool_bytes)} for streamed weights and "
        f"gradients ({plan.pool.reason})",
        f"RAM        {_limit(ledger.budgets[Tier.HOST])}: {', '.join(used)}",
    ]
    if plan.activations.mode != "keep":
        lines.append(f"activations {plan.activations.reason}")
    return lines


def _limit(budget: Budget) -> str:
    because = f", {budget.reason}" if budget.reason else ""
    return f"at most {format_bytes(budget.limit_bytes)} ({budget.given}{because})"
