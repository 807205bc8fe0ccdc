from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.core.budget import Budget
from stormtorch.core.errors import OutOfBudget, SettingError
from stormtorch.core.sizes import GiB
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books import limits
from stormtorch.memory.books.ledger import Ledger, Reservation, open_ledger

LIMIT = 1000


def small_ledger() -> Ledger:
    return Ledger(*(Budget(tier=tier, limit_bytes=LIMIT, given=f"{tier.setting}={LIMIT}") for tier in Tier))


@given(
    st.lists(
        st.tuples(st.sampled_from(Tier), st.sampled_from(Tag), st.integers(0, LIMIT), st.booleans(), st.integers(0, 5))
    )
)
def test_random_reservations_are_conserved_and_never_exceed_the_limit(
    steps: list[tuple[Tier, Tag, int, bool, int]],
) -> None:
    ledger, live = small_ledger(), list[Reservation]()
    for tier, tag, size, pin, releases in steps:
        used = sum(r.bytes for r in live if r.tier is tier)
        if used + size > LIMIT:
            with pytest.raises(OutOfBudget):
                ledger.reserve(tier, tag, size)
        else:
            live.append(ledger.reserve(tier, tag, size))
            if pin and tier is Tier.HOST:
                live[-1].pinned = True
        for _ in range(min(releases, len(live))):
            live.pop(len(live) // 2).release()
        ledger.check()
        assert {t: ledger.used_bytes(t) for t in Tier} == {t: sum(r.bytes for r in live if r.tier is t) for t in Tier}
        assert ledger.pinned_bytes == sum(r.bytes for r in live if r.pinned)
    for reservation in live:
        reservation.release()
        reservation.release()  # a second time changes nothing
    ledger.check()
    assert all(ledger.used_bytes(tier) == 0 for tier in Tier)
    assert ledger.pinned_bytes == 0


def test_a_refusal_has_the_four_parts_and_changes_nothing() -> None:
    ledger = Ledger(Budget(tier=Tier.DEVICE, limit_bytes=20 * GiB, given="vram='20GiB'"))
    held = ledger.reserve(Tier.DEVICE, Tag.ACTIVATIONS, 18 * GiB)
    with pytest.raises(OutOfBudget) as error:
        ledger.reserve(Tier.DEVICE, Tag.PARAMETERS, 3 * GiB)
    for part in ("3.0 GiB", "the device", "PARAMETERS", "18.0 GiB of 20.0 GiB used", "vram='20GiB'", "Raise it"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    ledger.check()
    assert ledger.used_bytes(Tier.DEVICE) == held.bytes


def test_a_tier_without_a_budget_says_which_setting_to_give() -> None:
    with pytest.raises(OutOfBudget, match="disk was not given"):
        Ledger().reserve(Tier.DISK, Tag.OPTIMIZER, 1)


def test_what_the_machine_lacks_is_refused_even_within_the_budget() -> None:
    budget = Budget(tier=Tier.HOST, limit_bytes=64 * GiB, given="ram='64GiB'")
    ledger = Ledger(budget, available={Tier.HOST: lambda: 5 * GiB})
    ledger.reserve(Tier.HOST, Tag.PARAMETERS, 5 * GiB).release()
    with pytest.raises(OutOfBudget, match=r"only 5\.0 GiB are free now"):
        ledger.reserve(Tier.HOST, Tag.PARAMETERS, 5 * GiB + 1)


def test_reservations_from_many_threads_are_conserved() -> None:
    ledger = small_ledger()

    def churn() -> None:
        for _ in range(2000):
            ledger.reserve(Tier.HOST, Tag.DATA, 1).release()

    threads = [threading.Thread(target=churn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.check()
    assert ledger.used_bytes(Tier.HOST) == 0
    assert 1 <= ledger.peak_bytes(Tier.HOST) <= 8


def test_auto_budgets_leave_headroom_and_say_how_much_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "host_available_bytes", lambda: 50 * GiB)
    monkeypatch.setattr(limits, "host_total_bytes", lambda: 64 * GiB)
    ledger = open_ledger(torch.device("cpu"), disk=tmp_path)
    host = ledger.budgets[Tier.HOST]
    assert host.limit_bytes == 50 * GiB - 64 * GiB // 20
    assert host.given == "ram='auto'"
    assert "50.0 GiB free of 64.0 GiB, less 3.2 GiB for" in host.reason
    assert all(budget.reason and budget.limit_bytes > 0 for budget in ledger.budgets.values())


def test_headroom_never_takes_more_than_half_of_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_available_bytes", lambda: 2 * GiB)
    monkeypatch.setattr(limits, "host_total_bytes", lambda: 4 * GiB)
    assert open_ledger(torch.device("cpu")).budgets[Tier.HOST].limit_bytes == GiB


def test_a_budget_beyond_the_machine_is_refused_with_its_size() -> None:
    with pytest.raises(SettingError, match=r"ram='9000TiB' is 9000\.0 TiB, but the host has"):
        open_ledger(torch.device("cpu"), ram="9000TiB")


def test_a_disk_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is not a directory"):
        open_ledger(torch.device("cpu"), disk=tmp_path / "missing")


def test_a_reservation_that_nobody_holds_is_released() -> None:
    ledger = small_ledger()
    held = ledger.reserve(Tier.HOST, Tag.DATA, 10)
    assert ledger.used_bytes(Tier.HOST) == 10
    del held
    assert ledger.used_bytes(Tier.HOST) == 0
    assert ledger.peak_bytes(Tier.HOST) == 10


def test_a_charge_may_be_released_by_the_garbage_collector_at_any_moment() -> None:
    """A finalizer can run inside a call of the ledger, on the same thread: that must neither hang nor break a sum."""
    ledger = small_ledger()
    ghost = ledger.reserve(Tier.HOST, Tag.DATA, 10)

    def available() -> int:
        with ledger._lock:
            ghost.release()
        return LIMIT

    ledger._available[Tier.HOST] = available
    held = ledger.reserve(Tier.HOST, Tag.DATA, 5)
    ledger.check()
    assert ledger.used_bytes(Tier.HOST) == held.bytes == 5


@pytest.mark.gpu
def test_the_ledger_knows_the_memory_of_the_gpu() -> None:
    device = torch.device("cuda", 0)
    free, total = torch.cuda.mem_get_info(device)
    budget = open_ledger(device).budgets[Tier.DEVICE]
    assert 0.9 * free < budget.limit_bytes < free <= total
    with pytest.raises(SettingError, match="the device has"):
        open_ledger(device, vram=total + 1)
