"""Every example runs as a person runs it, in two processes on the CPU; so does every block of Python in the pages."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import template

from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.strategy_registry import available_strategies, make_strategy

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

ELSEWHERE = ("https://ui.perfetto.dev",)
"""Links that lead out of the pages: they are not followed, so there are few."""

pytestmark = pytest.mark.slow


def name_of(page: Path) -> str:
    """`README.md`, or the path within `docs/`."""
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def run_program(*words: str, cwd: Path, expect: int = 0, timeout: float = 110) -> str:
    """What the program printed. It and all that it started are gone afterwards."""
    command = [sys.executable, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with template.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == expect, output
    return output


def two(example: str) -> list[str]:
    return [str(EXAMPLES / example), "--accelerator", "cpu", "--devices", "2"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rollout_engine_in_another_job_generates_with_the_weights(strategy: str, tmp_path: Path) -> None:
    output = run_program(*two("rollout.py"), "--strategy", strategy, "--steps", "10", cwd=tmp_path)
    assert float(re.findall(r"step 10: mean reward (\d\.\d\d)", output)[0]) > 0.9, output
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    assert "head.weight" not in index, "a tied weight is there once"
    assert {each.name for each in tmp_path.glob("*.safetensors")} == set(index.values())


def test_digits_are_read_in_two_processes(tmp_path: Path) -> None:
    output = run_program(*two("digits.py"), "--epochs", "6", cwd=tmp_path)
    last = re.findall(r"epoch 5: (\d+\.\d+)% of (\d+) held-out digits", output)
    assert len(last) == 1, output
    assert float(last[0][0]) >= 97
    assert last[0][1] == "359"
    assert "samples/s" in output


@pytest.mark.timeout(300)
def test_a_run_killed_in_mid_epoch_resumes_with_the_losses_of_an_uninterrupted_run(tmp_path: Path) -> None:
    output = run_program(str(EXAMPLES / "resume.py"), cwd=tmp_path, timeout=280)
    assert "killed with exit code 137" in output
    assert output.count("The losses of all 16 steps equal those of a run that was never stopped.") == 1


def test_a_low_accuracy_of_digits_is_reported_as_one_failure(tmp_path: Path) -> None:
    output = run_program(*two("digits.py"), "--epochs", "1", "--batch-size", "512", cwd=tmp_path, expect=1)
    assert output.count("of the held-out digits are read right; 97% are expected.") == 1


def test_the_plain_loop_reads_them_too(tmp_path: Path) -> None:
    output = run_program(str(EXAMPLES / "digits_torch.py"), "--epochs", "4", cwd=tmp_path)
    assert output.count("held-out digits") == 4


def test_the_two_loops_over_the_digits_differ_in_the_lines_of_fabric_only() -> None:
    with_fabric = (EXAMPLES / "digits.py").read_text().splitlines()
    plain = (EXAMPLES / "digits_torch.py").read_text().splitlines()
    added = [line for line in with_fabric if line.strip() and line not in plain]
    foreign = [line for line in added if not re.search(r"fabric|--accelerator|--strategy|--devices|plain loop", line)]
    assert not foreign
    assert len(added) <= 20


def test_the_gpt_learns_saves_loads_and_writes(tmp_path: Path) -> None:
    small = ["--batch-size", "8", "--context", "64", "--write", "20", "--unseen", "32"]
    learning = ["--steps", "30", "--validate-every", "15", "--save", "gpt.ckpt", "--below", "5"]
    output = run_program(*two("byte_gpt.py"), *small, *learning, cwd=tmp_path)
    half, end = (float(nats) for nats in re.findall(r"step \d+: ([\d.]+) nats per unseen byte", output))
    assert end < half < 5.5  # a uniform guess is 5.545
    reloaded = run_program(*two("byte_gpt.py"), *small, "--steps", "0", "--resume", "gpt.ckpt", cwd=tmp_path)
    nats = re.findall(r"^([\d.]+) nats per unseen byte", reloaded, re.MULTILINE)
    assert [float(one) for one in nats] == [end]
    assert "def " in reloaded


def by_name() -> list[tuple[str, int]]:
    """Every strategy that this machine can run but the one that they are held against, on two ranks where they can. The
    example gives two of them a function. Of the words that spawn ranks, each of which imports torch, one is here; the
    numbers of the other are in `tests/conformance/rows.py`."""
    found = []
    for name in sorted(set(available_strategies()) - {"single_device", "ddp_sharded_spawn"}):
        strategy = make_strategy(name)
        here = Target(accelerator=CPUAccelerator(), packages=strategy.look_for_packages())
        refusals = [strategy.refuse(replace(here, num_devices=size)) for size in (2, 1)]
        if name in ("manual", "model_parallel"):
            refusals = [None]
        if None in refusals:
            found.append((name, 2 - refusals.index(None)))
    return found


def words_for_a_curve(folder: Path, strategy: str, num_ranks: int) -> list[str]:
    """Twelve steps, over the same eight windows whatever the number of ranks."""
    small = ["--context", "16", "--dim", "16", "--layers", "2", "--write", "1", "--unseen", "8", "--steps", "12"]
    split = ["--devices", str(num_ranks), "--batch-size", str(8 // num_ranks), "--strategy", strategy]
    return ["--accelerator", "cpu", *split, *small, "--log", str(folder / strategy)]


def curve(folder: Path, strategy: str) -> list[float]:
    """The loss of each step."""
    with open(folder / strategy / "version_0" / "metrics.csv") as file:
        return [float(row["nats"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def curve_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    run_program(str(EXAMPLES / "byte_gpt.py"), *words_for_a_curve(folder, "single_device", 1), cwd=folder)
    return curve(folder, "single_device")


@pytest.mark.parametrize(("strategy", "num_ranks"), by_name())
def test_the_gpt_has_the_same_loss_curve_under_every_strategy(
    strategy: str, num_ranks: int, curve_alone: list[float], tmp_path: Path
) -> None:
    run_program(str(EXAMPLES / "byte_gpt.py"), *words_for_a_curve(tmp_path, strategy, num_ranks), cwd=tmp_path)
    losses = curve(tmp_path, strategy)
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(curve_alone, rel=0, abs=1e-5)


def test_the_gpt_learns_in_bfloat16(tmp_path: Path) -> None:
    small = ["--batch-size", "4", "--context", "32", "--write", "1", "--unseen", "32", "--steps", "5", "--below", "5.5"]
    run_program(*two("byte_gpt.py"), *small, "--precision", "bf16-mixed", cwd=tmp_path)


def test_a_loss_that_is_not_below_what_was_asked_for_is_a_failure(tmp_path: Path) -> None:
    small = ["--batch-size", "4", "--context", "32", "--write", "1", "--unseen", "32", "--steps", "1", "--below", "0"]
    output = run_program(*two("byte_gpt.py"), *small, cwd=tmp_path, expect=1)
    assert output.count("nats per byte is not below 0.0.") == 1


def test_the_gan_draws_digits_with_two_models_and_two_optimizers(tmp_path: Path) -> None:
    output = run_program(*two("gan.py"), "--epochs", "2", cwd=tmp_path)
    losses = re.search(r"generator loss ([\d.]+)  discriminator loss ([\d.]+)\n", output)
    assert losses is not None
    picture = output[losses.end() :].splitlines()
    assert len(picture) == 8


def test_the_recommender_learns_the_same_with_tables_on_one_rank_and_on_two(tmp_path: Path) -> None:
    import torch

    from fabric import read_checkpoint

    small = [str(EXAMPLES / "recommender.py"), "--accelerator", "cpu", "--pairs", "2000", "--epochs", "1"]
    models = []
    for devices, batch_size in (("1", "128"), ("2", "64")):
        words = ["--devices", devices, "--batch-size", batch_size, "--save", f"{devices}.ckpt"]
        output = run_program(*small, *words, cwd=tmp_path)
        assert re.findall(r"epoch 0: the word that came next is preferred in [\d.]+% of (\d+) pairs", output) == ["200"]
        models.append(read_checkpoint(tmp_path / f"{devices}.ckpt")["model"])
    assert models[0]["words.weight"].shape == (4000, 32)
    torch.testing.assert_close(models[1], models[0], rtol=0.0, atol=3e-3)  # Adam's steps are 1e-2; rounding moves few


@pytest.mark.timeout(600)
def test_an_encoder_that_is_fine_tuned_has_the_loss_of_one_process_over_all_masked_words(tmp_path: Path) -> None:
    found = []
    for words in (("--batch-size", "4"), ("--batch-size", "2", "--devices", "2")):
        output = run_program(str(EXAMPLES / "finetune_text.py"), *words, cwd=tmp_path, timeout=280)
        found.append(re.findall(r"(before|epoch 0|after): ([\d.]+) nats over (\d+) words", output))
    assert [words for _, _, words in found[0]] == [words for _, _, words in found[1]]
    losses = [[float(nats) for _, nats, _ in lines] for lines in found]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[0][2] < losses[0][0] - 0.3


def blocks_of_python() -> dict[str, str]:
    """Each block of Python in the README and in `docs/`, by its page and its number there."""
    return {
        f"{name_of(page)}-{number}": block
        for page in PAGES
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    }


def blocks_that_fail() -> set[str]:
    """Those below `<!-- ends with 1 -->`: programs that are wrong, as the page says."""
    return {
        f"{name_of(page)}-{number}"
        for page in PAGES
        for number, (fails, _) in enumerate(
            re.findall(r"(<!-- ends with 1 -->\n)?```python\n(.*?)```", page.read_text(), re.DOTALL)
        )
        if fails
    }


LIKE_BEFORE = {
    "coming-from/accelerate.md-0": r"(?m)^epoch 4: [\d.]+% of 200$",  # it asserts how many are right
    "coming-from/lightning.md-0": r"(?m)^Sequential 32-true$",
    "coming-from/torchrun.md-0": r"(?m)^epoch 4: [\d.]+% of 200$",
}
"""What a script prints that another library ran before: so does the script before it (`tests/clients`)."""


@pytest.mark.parametrize("block", blocks_of_python())
def test_a_block_of_python_in_the_pages_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(blocks_of_python()[block])
    output = run_program(str(script), cwd=tmp_path, expect=1 if block in blocks_that_fail() else 0)
    assert re.search(LIKE_BEFORE.get(block, ""), output), output


def test_the_loop_of_preemption_md_that_is_preempted_twice_ends_with_the_best_epoch_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    ends = []
    unbuffered = "import sys\nsys.stdout.reconfigure(line_buffering=True)\n"  # a fork cannot have `python -u`
    for folder, epochs in ((tmp_path / "whole", []), (tmp_path / "preempted", ["epoch 3:", "epoch 6:"])):
        folder.mkdir()
        (folder / "train.py").write_text(unbuffered + blocks_of_python()["how-to/preemption.md-1"])
        for epoch in epochs:
            command = [sys.executable, "train.py"]
            with template.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith(epoch):
                        process.send_signal(signal.SIGTERM)
            assert process.returncode == 0
            last = max(os.listdir(folder / "run"))
            assert "metric" not in last
        ends.append(run_program("train.py", cwd=folder).splitlines()[-1])
    assert ends[0].startswith("the best is 0.9")
    assert ends[1] == ends[0]


def test_the_loop_of_accumulate_md_that_is_stopped_in_mid_epoch_resumes_with_the_weights_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    program = blocks_of_python()["how-to/accumulate.md-1"] + "\nfabric.print(model.weight.tolist())\n"
    stopped = program.replace("fabric.num_steps < 10", "fabric.num_steps < 5")
    assert stopped != program
    ends = []
    for folder, programs in ((tmp_path / "whole", [program]), (tmp_path / "stopped", [stopped, program])):
        folder.mkdir()
        for each in programs:
            (folder / "train.py").write_text(each)
            output = run_program("train.py", cwd=folder)
        ends.append(output.splitlines()[-1])
    assert ends[0].startswith("[[")
    assert ends[1] == ends[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link in ELSEWHERE:
            continue
        target, _, heading = link.partition("#")
        file = page.parent / target if target else page
        assert file.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}, link


def test_strategies_md_lists_all_strategies() -> None:
    from fabric.strategies.strategy_registry import strategy_registrations

    text = (ROOT / "docs/how-to/strategies.md").read_text()
    table = text[text.index("| `strategy=` |") : text.index('"Others" are the devices')]
    listed = {
        name for row in table.splitlines() if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    } - {"strategy"}
    assert listed == {name for name, one in strategy_registrations().items() if one.source == "torchfabric"}


def test_a_tensor_parallel_gpt_learns_like_replicas(tmp_path: Path) -> None:
    curves = []
    for batch_size, axes in (("8", ("--tensor", "2")), ("4", ("--data", "2"))):
        options = ["--batch-size", batch_size, "--steps", "20", *axes]
        output = run_program(*two("tensor_parallel.py"), *options, cwd=tmp_path)
        curves.append([float(nats) for nats in re.findall(r"step \d+: ([\d.]+) nats per byte", output)])
    assert curves[0][1] < curves[0][0] < 5.5  # a uniform guess is 5.545
    assert max(abs(cut - whole) for cut, whole in zip(*curves, strict=True)) < 1e-3
