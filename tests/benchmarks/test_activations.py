"""The activation benchmark runs tiny on the CPU: each method gives the same gradients, the figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.activations.cases import GROUPS, OURS, Planned, tiny
from benchmarks.activations.largest import largest
from benchmarks.activations.loss import LossHead
from benchmarks.activations.methods import HOLDING, METHODS
from benchmarks.activations.model import SIZES, LossWork, build, repeat_heads
from benchmarks.activations.results import Figures, Row, table
from benchmarks.activations.runner import Runner
from benchmarks.activations.spans import common, length, union
from benchmarks.activations.storm import moved
from benchmarks.activations.timeline import drawn, from_events, write
from benchmarks.training import workload
from benchmarks.training.cases import Case
from benchmarks.training.packages import folder
from benchmarks.training.results import Result
from torch import Tensor, nn

from ..forkserver import run

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

needs_trl = pytest.mark.skipif(
    not (folder() / "trl/models/activation_offloading.py").is_file(), reason=f"no TRL in {folder()}"
)


def activations(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.activations", *words, "--commit", "abc123", "--tiny"]
    return run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


def work_of(method: str) -> LossWork:
    size = SIZES["tiny-8-layers"]
    tokens, targets = workload.batch(size, 2, CPU)
    checkpointing = HOLDING[method].checkpointing
    model = build(size, targets, dtype=torch.float32, device=CPU, checkpointing=checkpointing)
    case = Case(method=method, size="tiny-8-layers", device="cpu", dtype="float32", micro_batch=2)
    return LossWork(case=case, device=CPU, dtype=torch.float32, model=model, tokens=tokens, targets=targets)


def loss_and_gradients(method: str) -> tuple[float, dict[str, Tensor]]:
    """Of the second of two steps; weights do not change, so it must repeat the first."""
    work, gradients = work_of(method), {}

    def keep(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()

        return hook

    for name, parameter in work.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(keep(name))
    training = HOLDING[method].start(work)
    first, second = float(training.step()), float(training.step())
    training.close()
    assert first == second
    assert all(parameter.grad is None for parameter in work.model.parameters())
    return second, gradients


@pytest.mark.parametrize(
    "method",
    [
        "checkpoint",
        "save_on_cpu",
        pytest.param("trl", marks=needs_trl),
        pytest.param("trl-checkpoint", marks=needs_trl),
        pytest.param("storm-auto"),
        pytest.param("storm-offload"),
    ],
)
def test_every_method_gives_the_gradients_of_resident(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method.startswith("trl"):  # it offloads from the accelerator; let the CPU be one
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: CPU)
    loss, gradients = loss_and_gradients(method)
    expected_loss, expected = loss_and_gradients("resident")
    assert loss == expected_loss
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


def test_all_methods_of_the_groups_exist() -> None:
    planned = [one for group in GROUPS.values() for one in group]
    assert {one.case.method for one in planned} == set(METHODS)
    assert {one.at_peak_of for one in planned} - {""} <= set(METHODS)
    assert set(OURS) <= set(METHODS)
    assert {one.case.size for one in planned} | {tiny(one).case.size for one in planned} == set(SIZES)


@pytest.mark.wide
@pytest.mark.parametrize("group", ["forward_backward", "fp32"])  # the others differ in sizes, which are tiny here
def test_storm_runs(group: str, tmp_path: Path) -> None:
    methods = {one.case.method for one in GROUPS[group] if one.case.method.startswith("storm")}
    first = ["resident", "checkpoint"] if group == "forward_backward" else ["resident"]
    done = activations(group, "--methods", *first, *sorted(methods), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr + (tmp_path / f"{group}.log").read_text()
    report = json.loads((tmp_path / f"{group}.json").read_text())
    rows = report["rows"]
    assert {row["loss"] for row in rows} == {rows[0]["loss"]}
    assert {row["counted"] for row in rows[len(first) :]} == {"report"}
    if group == "forward_backward":
        check_written(report, tmp_path, done.stdout)


def check_written(report: dict[str, Any], where: Path, printed: str) -> None:
    resident = report["rows"][0]
    assert report["commit"] == "abc123"
    assert report["machine"]
    assert resident["of_resident"] == 1
    assert len(resident["steps_s"]) == 2
    assert resident["rss_bytes"] > 2**20
    assert "| checkpoint |  | tiny | 1 |" in (where / "forward_backward.md").read_text()
    assert "| checkpoint |  | tiny | 1 |" in printed


@pytest.mark.wide
def test_training_within_a_budget_is_searched(tmp_path: Path) -> None:
    done = activations("budget", "--methods", "storm", "fsdp2", "--first", "storm=2", "--out", str(tmp_path))
    assert "storm-backward tiny @1" not in done.stderr
    assert "fsdp2 tiny @1" in done.stderr
    assert done.returncode == 0, done.stderr + (tmp_path / "budget.log").read_text()
    storm, fsdp2 = json.loads((tmp_path / "budget.json").read_text())["rows"]
    assert storm["case"]["micro_batch"] == fsdp2["case"]["micro_batch"] == 2
    assert storm["note"] == "2 is the most that was tried"
    assert storm["loss"] == pytest.approx(fsdp2["loss"], abs=1e-4)
    assert storm["counted"] == "report"
    assert storm["in_bytes"] > 2 * workload.SIZES["tiny"].parameters


@pytest.mark.wide
def test_a_peer_without_its_packages_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORM_PEERS", str(tmp_path / "nothing"))
    done = activations("budget", "--methods", "ramtorch", "--out", str(tmp_path))
    assert done.returncode == 0
    assert "FAILED: no peers' packages in" in done.stdout


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = activations("fp32", "--methods", "trl", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "fp32 has no method trl. It has resident, storm-offload." in done.stderr


@pytest.mark.wide
@pytest.mark.parametrize("first", ["trl=2", "storm=0", "storm", "24"])
def test_where_to_look_first_is_said_by_method(first: str, tmp_path: Path) -> None:
    done = activations("budget", "--first", first, "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--first takes METHOD=N with N at least 1" in done.stderr
    assert "budget has storm, fsdp2, ds3, ramtorch, ramtorch-offload." in done.stderr


def test_the_chunked_loss_is_cross_entropy() -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 32, bias=False)
    x, targets = torch.randn(2, 5, 8, requires_grad=True), torch.randint(32, (2, 5))
    loss = LossHead(head, targets, chunk=3)(x)
    ours = torch.autograd.grad(2 * loss, (x, head.weight))
    plain = F.cross_entropy(head(x).flatten(0, 1), targets.flatten())
    theirs = torch.autograd.grad(2 * plain, (x, head.weight))
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(ours, theirs)


def test_the_chunked_loss_saves_nothing_and_follows_autocast() -> None:
    saved: list[Tensor] = []
    head = LossHead(nn.Linear(8, 32, bias=False), torch.zeros(1, 4, dtype=torch.long), chunk=3)
    x = torch.randn(1, 4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), torch.autocast("cpu"):  # type: ignore[func-returns-value]
        head(x).backward()
    assert not saved
    assert x.grad is not None
    assert head.weight.grad is not None
    assert x.grad.dtype == head.weight.grad.dtype == torch.float32
    with torch.no_grad():
        assert not head(x).requires_grad


def test_repeated_heads_change_no_number() -> None:
    size = SIZES["tiny-8-layers"]
    tokens, targets = workload.batch(size, 1, CPU)
    model = build(size, targets, dtype=torch.float32, device=CPU, checkpointing=False)
    names = [name for name, _ in model.named_parameters()]
    loss = model(tokens)
    repeat_heads(model)
    torch.testing.assert_close(model(tokens), loss)
    assert [name for name, _ in model.named_parameters()] == names


def test_spans() -> None:
    spans = union([(5, 6), (0, 2), (1, 3), (8, 9)])
    assert spans == [(0, 3), (5, 6), (8, 9)]
    assert union(spans, gap=2) == [(0, 9)]
    assert length(spans) == 5
    assert common(spans, [(2, 5.5), (8.5, 20)]) == [(2, 3), (5, 5.5), (8.5, 9)]
    assert common(spans, []) == []


def event(kind: str, name: str, start: float, duration: float, size: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": 5e9 + start, "dur": duration, "args": {"bytes": size}}


def test_a_timeline_tells_what_ran_at_once(tmp_path: Path) -> None:
    recorded = from_events(
        [
            event("kernel", "gemm", 0, 4000),
            event("kernel", "norm", 2000, 4000),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 3000, 2000, 70),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4000, 6000, 40),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4000, 1000, 2),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 1, 9),
            event("cpu_op", "aten::mm", 0, 50000),
            {"ph": "i", "name": "mark", "ts": 0},
        ]
    )
    assert recorded is not None
    assert recorded.wall_us == 10000
    assert recorded.busy == pytest.approx(0.6)
    assert recorded.at_once == pytest.approx(0.1)
    assert recorded.copied_bytes == {"in": 70, "out": 42}
    file = tmp_path / "timeline.json"
    write(recorded, {"case": "storm-auto"}, file)
    assert json.loads(file.read_text())["lanes_us"]["compute"] == [[0, 6000]]
    compute, inwards, outwards = drawn(file).splitlines()
    assert compute == f"compute |{'█' * 60}{' ' * 40}|"
    assert inwards == f"in      |{' ' * 30}{'█' * 20}{' ' * 50}|"
    assert outwards == f"out     |{' ' * 40}{'█' * 60}|"
    assert from_events([event("cpu_op", "aten::mm", 0, 1)]) is None


@pytest.mark.parametrize("guessed", [False, True], ids=["", "guessed"])
@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 8, 12, 13, 15, 31, 200])
def test_the_largest_micro_batch_is_found(capacity: int, guessed: bool) -> None:
    tried: list[int] = []

    def run(micro_batch: int, _left_s: float) -> Row:
        tried.append(micro_batch)
        failed = "" if micro_batch <= capacity else "OutOfMemoryError: CUDA out of memory."
        return Row(result=Result(case=Case(method="fsdp2", micro_batch=micro_batch), failed=failed))

    best = largest(run, start=8, most=256, limit_s=1000, guessed=guessed).result
    assert not best.failed
    found = best.case.micro_batch
    assert found <= capacity <= found + found // 8
    assert len(tried) == len(set(tried)) <= (12 if guessed else 9)
    if guessed and capacity == 8:
        assert tried == [8, 9]
    if guessed and capacity == 7:
        assert tried == [8, 7]


def row_of(failed: str = "") -> Row:
    return Row(result=Result(case=Case(method="ds3"), failed=failed))


def test_a_search_ends_with_what_it_has() -> None:
    clock = iter(range(0, 10_000, 30)).__next__
    slow = largest(lambda _batch, _left_s: row_of(), start=8, most=256, limit_s=100, clock=clock)
    assert not slow.result.failed
    assert slow.note.startswith("out of time before ")
    broken = largest(lambda _batch, _left_s: row_of("ImportError: x"), start=8, most=256, limit_s=100)
    assert broken.result.failed == "ImportError: x"
    later = largest(
        lambda batch, _left_s: row_of("stopped after 9 s" if batch > 8 else ""), start=8, most=256, limit_s=100
    )
    assert not later.result.failed
    assert later.note == "16: stopped after 9 s"
    nothing = largest(lambda _batch, _left_s: row_of("out of RAM: stopped"), start=8, most=256, limit_s=100)
    assert nothing.result.failed == "out of RAM: stopped"


def test_the_table_shows_shares_of_the_link() -> None:
    figures = Figures(
        link_in_bytes_per_s=50e9, link_out_bytes_per_s=40e9, in_bytes=10**10, out_bytes=10**10, busy=0.9, at_once=0.5
    )
    resident = Row(result=Result(case=Case(method="resident"), step_s=0.5, tokens=16384), figures=Figures(in_bytes=8))
    offload = Row(
        result=Result(case=Case(method="storm-auto", vram=str(15 * 2**30)), step_s=1.0, tokens=16384, loss=10.4),
        figures=figures,
    )
    failed = Row(result=Result(case=Case(method="trl"), failed="OutOfMemoryError: a | b", rss_bytes=2**30))
    assert offload.link_s == (0.2, 0.25)
    assert resident.of_link is None
    lines = table([resident, offload, failed]).splitlines()
    assert lines[3].startswith("| storm-auto | 15.0 GiB | 3b | 8 | 1.000 | 16,384 | 50% |")
    assert "| 9.3 / 9.3 | 50.0 / 40.0 | 25% / 45% | 90% | 50% | 10.4000 |" in lines[3]
    assert "| FAILED: OutOfMemoryError: a / b |" in lines[4]
    assert len({line.count("|") for line in lines}) == 1


def test_storm_is_asked_for_totals() -> None:
    class Report:
        steps, pinned_bytes = 4, 7
        bytes_in_per_step = {"activations": 10.0, "parameters": 2.5}  # noqa: RUF012
        bytes_out_per_step: dict[str, float] = {}  # noqa: RUF012

    assert moved(Report()).in_bytes == 50
    assert moved(Report()).out_bytes == 0
    assert moved(Report()).pinned_bytes == 7


def test_tiny_keeps_what_a_case_is_about() -> None:
    at_peak = tiny(Planned(case=Case(method="storm-auto", size="3b-32k"), at_peak_of="checkpoint"))
    assert at_peak.case.size == "tiny-32k"
    assert at_peak.case.device == "cpu"
    assert at_peak.case.vram == "256MiB", "there is no peak to take on a CPU"
    assert not at_peak.at_peak_of


def test_a_case_takes_the_peak_of_the_one_before_it(tmp_path: Path) -> None:
    class Echo(Runner):
        def run(self, case: Case) -> Row:
            return Row(result=Result(case=case))

    runner = Echo(folder=tmp_path, log=tmp_path / "log", traces=None)
    planned = GROUPS["forward_backward"][-1]
    trl = Result(case=Case(method="trl"), vram_allocated_bytes=12345)
    row = runner.at_peak(planned, [Row(result=trl)])
    assert (row.result.case.method, row.result.case.vram) == ("storm-auto", "12345")
    assert row.note == "at the peak of trl"
    assert runner.at_peak(planned, []).result.failed == "no peak of trl is known: run it too, or give --vram"
