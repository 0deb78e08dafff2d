"""Run litgpt's own scripts on a tiny model, over Lightning Fabric or over `fabric.lightning`.

    LITGPT_RUN="CHECKPOINT LIBRARY FOLDER SCRIPT:STRATEGY:DEVICES ..." python litgpt_run.py tiny

CHECKPOINT: a folder with random weights, a tokenizer and data, which the first run makes. Runs train from there.

The words are in a variable because litgpt reads the command line again for what it saves, and a launcher runs it again
in each rank.

`LIBRARY`: lightning or fabric. Over fabric, `import lightning as L; L.Fabric` and every `lightning.fabric.X` for which
there is a `fabric.lightning.X` are ours before litgpt is imported; what else litgpt takes from Lightning (its data
module, two private loaders of weights) stays. `SCRIPT`: pretrain, or one of finetune. `STRATEGY`: `script`, the one
that the script chooses by itself (fsdp, or a mesh), or a word that takes its place. The losses are in
`FOLDER/SCRIPT-STRATEGY-DEVICES/logs/csv/version_0/metrics.csv`, where the script's own logger writes them.

One run is a program as a user starts it. Of several, each rank is a fork of this process, which has imported litgpt
once, with the variables that torchrun gives its ranks; `ended RUN: CODE` is printed for each, with the largest exit
code.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

VOCABULARY = 64
BLOCK = 32
MODEL = {
    "name": "tiny",
    "block_size": BLOCK,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "n_layer": 3,  # adapters begin in the third
    "n_head": 2,
    "n_embd": 16,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 32,
}


def put_ours_in_its_place() -> None:
    """Let `lightning.fabric` be `fabric.lightning` for who imports it from now on."""
    import lightning

    import fabric.lightning as ours

    for module in pkgutil.walk_packages(ours.__path__, "fabric.lightning."):
        loaded = importlib.import_module(module.name)
        sys.modules[module.name.replace("fabric.lightning", "lightning.fabric", 1)] = loaded
    lightning.Fabric, lightning.seed_everything = ours.Fabric, ours.seed_everything


def choose_strategy(word: str) -> None:
    """Run on the processor, with the strategy of `word` where there are several ranks."""
    import lightning

    library_s = lightning.Fabric

    class OnProcessor(library_s):  # type: ignore[misc, valid-type]
        def __init__(self, *, devices: int, strategy: Any = "auto", **options: Any) -> None:
            strategy = strategy if word == "script" or devices == 1 else word
            super().__init__(**{**options, "accelerator": "cpu", "devices": devices, "strategy": strategy})

    lightning.Fabric = OnProcessor


def tokens_module() -> Any:
    """Data for pretraining: rows of tokens in a fixed order."""
    from litgpt.data import DataModule

    class Tokens(DataModule):  # type: ignore[misc]
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = BLOCK) -> None:
            self.batch_size, self.length = batch_size, max_seq_length

        def train_dataloader(self) -> DataLoader[Any]:
            return self.rows(seed=1, count=32)

        def val_dataloader(self) -> DataLoader[Any]:
            return self.rows(seed=2, count=8)

        def rows(self, seed: int, count: int) -> DataLoader[Any]:
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randint(0, VOCABULARY, (count, self.length + 1), generator=generator)
            # Of four rows, two ranks take (0, 2) and (1, 3) there, (0, 1) and (2, 3) here: the same losses on each.
            rows[1::4] = rows[2::4]
            return DataLoader(rows, batch_size=self.batch_size, shuffle=False)  # type: ignore[arg-type]

    return Tokens()


def instructions_module(folder: Path) -> Any:
    """Data for finetuning, in litgpt's own format and a fixed order."""
    from litgpt.data import JSON
    from litgpt.data.base import get_sft_collate_fn
    from litgpt.prompts import Default

    class InOrder(JSON):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            collate = get_sft_collate_fn(max_seq_length=self.max_seq_length, ignore_index=self.ignore_index)
            return DataLoader(self.train_dataset, batch_size=self.batch_size, shuffle=False, collate_fn=collate)

    return InOrder(folder, prompt_style=Default(), num_workers=0)


def make_checkpoint(folder: Path) -> None:
    """Random weights, a tokenizer of words, and instructions for finetuning."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    torch.manual_seed(0)
    torch.save(GPT(Config(**MODEL)).state_dict(), folder / "lit_model.pth")
    save_config(Config(**MODEL), folder)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(50)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    for split, count in (("train", 24), ("val", 4)):
        rows = [{"instruction": f"w{i % 50} w{i % 7}", "output": f"w{i % 11} w{i % 13} w{i % 3}"} for i in range(count)]
        (folder / f"{split}.json").write_text(json.dumps(rows))


def make_checkpoint_in_a_fork(folder: Path) -> None:
    """The ranks of this process are forks as well, which need one that has drawn and computed nothing."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    code = 1
    try:
        make_checkpoint(folder)
        code = 0
    finally:
        os._exit(code)


def run(checkpoint: Path, script: str, devices: int, out: Path) -> None:
    """Call the script's `setup`, as litgpt's command line does."""
    from litgpt.args import EvalArgs, TrainArgs

    if script.startswith("pretrain"):
        from litgpt import pretrain
        from litgpt.config import Config

        pretrain.setup(
            "tiny",
            model_config=Config(**MODEL),
            out_dir=out,
            precision="32-true",
            initial_checkpoint_dir=checkpoint,  # made empty and initialised in shards, weights come in another order
            data=tokens_module(),
            train=TrainArgs(
                save_interval=2,
                log_interval=1,
                global_batch_size=8,
                micro_batch_size=2,
                max_tokens=5 * 8 * BLOCK,
                max_norm=1.0,
                # litgpt divides `max_tokens` by the ranks: one process of twice the batch would decay half as fast.
                min_lr=1e-3 if script == "pretrain_at_one_rate" else 1e-4,
                lr_warmup_steps=1,
                tie_embeddings=False,
            ),
            eval=EvalArgs(interval=2, max_iters=2, initial_validation=True),
            devices=devices,
            logger_name="csv",
        )
        return
    module = importlib.import_module(f"litgpt.finetune.{script}")
    train = TrainArgs(
        save_interval=2,
        log_interval=1,
        global_batch_size=4,
        micro_batch_size=1,
        lr_warmup_steps=2,
        epochs=1,
        max_seq_length=BLOCK,
    )
    module.setup(
        checkpoint,
        out_dir=out,
        precision="32-true",
        devices=devices,
        data=instructions_module(checkpoint),
        train=train,
        eval=EvalArgs(interval=2, max_new_tokens=4, max_iters=2),
        logger_name="csv",
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
        **({"lora_dropout": 0.0} if script.startswith("lora") else {}),
    )


def main() -> None:
    """See the module."""
    checkpoint, library, folder, *runs = os.environ["LITGPT_RUN"].split()
    if not Path(checkpoint).exists():
        make_checkpoint_in_a_fork(Path(checkpoint))
    if library == "fabric":
        put_ours_in_its_place()
    if len(runs) == 1:
        run_one(Path(checkpoint), runs[0], Path(folder))
        return
    for module in ("pretrain", "finetune.adapter_v2"):
        importlib.import_module(f"litgpt.{module}")
    for each in runs:
        ranks = fork_ranks(int(each.split(":")[2]))
        if not ranks:
            run_one(Path(checkpoint), each, Path(folder))
            return
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(f"ended {each}: {max(map(abs, codes))}", flush=True)


def run_one(checkpoint: Path, words: str, folder: Path) -> None:
    """One script, with a strategy, on so many ranks."""
    script, strategy, devices = words.split(":")
    choose_strategy(strategy)
    run(checkpoint, script, int(devices), folder / words.replace(":", "-"))


def fork_ranks(size: int) -> list[int]:
    """The process ids of the ranks; in each of these, nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks: list[int] = []
    for rank in range(size):
        if not (child := os.fork()):
            if size > 1:
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                groups = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                variables = {**places, **groups, "TORCHELASTIC_RUN_ID": "litgpt"}
                os.environ.update({name: str(value) for name, value in variables.items()})
            return []
        ranks.append(child)
    return ranks


if __name__ == "__main__":
    main()
