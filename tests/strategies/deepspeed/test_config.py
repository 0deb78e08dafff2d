"""DeepSpeed's dictionary: known keys pass, any other raises with what to write; the tables are its own words."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import template
from devices import ACCELERATOR

from fabric import Fabric
from fabric.strategies.deepspeed.config import KEYS, OFFLOAD_KEYS, ZERO_KEYS, engine_config
from fabric.strategies.deepspeed.library import why_not
from fabric.strategies.deepspeed.strategy import DeepSpeedStrategy
from fabric.strategies.precision.precision import Precision

BAD: list[tuple[dict[str, Any], str]] = [
    ({"config": {"zero_optimisation": {}}}, "Did you mean 'zero_optimization'?"),
    ({"config": {"zero_optimization": {"overlap_com": True}}}, "`overlap_com` in `zero_optimization` in"),
    ({"config": {"zero_optimization": {"overlap_com": True}}}, "Did you mean 'overlap_comm'?"),
    ({"config": {"gradient_clipping": 1.0}}, "Call `fabric.clip_gradients(model, optimizer, max_norm=...)`"),
    ({"config": {"gradient_accumulation_steps": 4}}, "Accumulate with `fabric.no_backward_sync`."),
    ({"config": {"bf16": {"enabled": True}}}, "Pass `Fabric(precision='bf16-true')`."),
    ({"config": {"train_batch_size": 8}}, "The batch size of the loader sets it."),
    ({"config": {"scheduler": {"type": "WarmupLR"}}}, "Make a scheduler from the optimizer that `setup` returns"),
    ({"config": {"optimizer": {"type": "Adam"}}}, "Pass an optimizer to `fabric.setup(model, optimizer)`."),
    (
        {"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}},
        "can only be offloaded to main memory",
    ),
    ({"config": {"zero_optimization": {"offload_optimizer": {"pinned": True}}}}, "`pinned` in `offload_optimizer` in"),
    ({"stage": 3, "config": {"zero_optimization": {"stage": 2}}}, "both set the ZeRO stage. Leave one out."),
    ({"stage": 0}, "the whole model on every rank, is `strategy='ddp'`"),
    ({"stage": 4}, "ZeRO has the stages 1, 2 and 3, not 4."),
    ({"stage": 2, "offload_parameters": True}, "at stage 3, and this is stage 2. Write `stage=3`"),
    (
        {"offload_optimizer": True, "config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
        "`offload_optimizer=True` and `offload_optimizer` in the configuration set the same option.",
    ),
    ({"stage": 1, "config": {"zero_optimization": {"overlap_comm": True}}}, "`overlap_comm` at stage 1"),
    ({"config": "/nowhere/ds.json"}, "the file '/nowhere/ds.json' is not a file of JSON: [Errno 2] No such file"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_unsupported_options_raise_in_the_constructor(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DeepSpeedStrategy(**options)


@pytest.mark.parametrize(("config", "what"), [([1], "is a `list`"), ({"fp16": "on"}, "is `'on'`. Write a dict")])
def test_a_config_that_is_not_a_dictionary_raises_a_type_error(config: Any, what: str) -> None:
    with pytest.raises(TypeError, match=re.escape(what)):
        DeepSpeedStrategy(config=config)


def test_a_config_file_is_read_and_checked_in_the_constructor(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": 10}}))
    strategy = DeepSpeedStrategy(config=path)
    path.write_text("{")
    assert strategy == DeepSpeedStrategy(config={"zero_optimization": {"stage": 3, "reduce_bucket_size": 10}})
    with pytest.raises(ValueError, match="is not a file of JSON"):
        DeepSpeedStrategy(config=path)


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        ("64-true", "DeepSpeed keeps float32 weights and computes in float32, bfloat16 or float16."),
        ("16-mixed", "Write one of '32-true', 'bf16-true', 'bf16-mixed', '16-true'."),
        ("16-true", "DeepSpeed has no float16 there. Write 'bf16-true' or 'bf16-mixed'."),
    ],
)
def test_an_unsupported_precision_raises_in_the_constructor(precision: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Fabric(accelerator=ACCELERATOR, strategy=DeepSpeedStrategy(), devices=2, precision=precision)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "needs the package deepspeed, which is not installed. Run `pip install 'torchfabric[deepspeed]'`."),
        ("0.18.3", "works with DeepSpeed 0.19, and 0.18.3 is installed. Run `pip install 'deepspeed==0.19.*'`."),
    ],
)
def test_without_a_supported_deepspeed_the_error_says_what_to_install(found: str | None, sentence: str) -> None:
    assert sentence in str(why_not(found))
    assert why_not("0.19.8") is None


def test_options_for_float16_need_that_precision() -> None:
    with pytest.raises(ValueError, match="`fp16` in DeepSpeed's configuration is for `precision='16-true'`"):
        Fabric(accelerator=ACCELERATOR, strategy=DeepSpeedStrategy(config={"fp16": {"loss_scale": 0}}), devices=2)


def test_unrequested_features_of_deepspeed_are_disabled() -> None:
    made = engine_config({}, stage=3, offload={}, precision=Precision.parse("bf16-true"))
    assert made["gradient_clipping"] == 0.0
    assert made["zero_optimization"]["memory_efficient_linear"] is False
    assert made["bf16"] == {"enabled": True}
    plain = engine_config({}, stage=1, offload={}, precision=Precision.parse("32-true"))
    assert "bf16" not in plain


WORDS = """
import json
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig as O
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as P
import deepspeed.monitor.config, deepspeed.runtime.constants as constants
names = lambda kind: [field.alias or name for name, field in kind.model_fields.items()]
import deepspeed.profiling.constants as profiling, deepspeed.runtime.swap_tensor.constants as aio
import deepspeed.comm.constants as comm, deepspeed.runtime.zero.config as zero
values = {v for m in (constants, profiling, aio, comm, zero) for v in vars(m).values() if isinstance(v, str)}
values |= set(names(deepspeed.monitor.config.DeepSpeedMonitorConfig)) | {"timers"}
print("WORDS" + json.dumps([sorted(values), names(DeepSpeedZeroConfig), names(O) + names(P)]))
"""


@pytest.mark.slow
def test_every_accepted_key_is_one_of_deepspeed() -> None:
    ran = template.run([sys.executable, "-c", WORDS], capture_output=True, text=True, timeout=100, check=True)
    top, zero, offload = json.loads(ran.stdout.split("WORDS")[1])
    assert set(KEYS) <= set(top)
    assert set(ZERO_KEYS) <= set(zero)
    assert set(OFFLOAD_KEYS) <= set(offload)


def test_constructing_a_strategy_does_not_import_deepspeed() -> None:
    code = (
        "import sys; from fabric import Fabric; from fabric.strategies.deepspeed.strategy import DeepSpeedStrategy;"
        "Fabric(accelerator='cpu', strategy=DeepSpeedStrategy(), devices=2);"
        "assert 'deepspeed' not in sys.modules"
    )
    template.run([sys.executable, "-c", code], check=True, timeout=100)
