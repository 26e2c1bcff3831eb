"""Programs of large frameworks, planned for 64 GPUs by their own command lines.

Those that aren't installed are skipped: pip install 'virtual-gpus[frameworks]'.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import ranks

PROGRAMS = Path(__file__).parent / "programs"
TITAN = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "."
[optimizer]
name = "AdamW"
[training]
local_batch_size = 4
seq_len = 128
steps = 8
dataset = "c4_test"
dataset_path = "texts"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
FSDP_AND_TP = "-m", "torchtitan.train", "--job.config_file", "titan.toml", "--parallelism.tensor_parallel_degree", "2"
PIPELINE = "-m", "torchtitan.train", "--job.config_file", "titan.toml", "--parallelism.pipeline_parallel_degree", "2"
FINITE = "no number is infinite or NaN: tested at "
PLANS = {  # what is installed, the command line, which ranks are run, what is assumed
    "Trainer, DDP": ("transformers", [PROGRAMS / "trainer.py"], [0], [FINITE]),
    "Trainer, FSDP2": ("transformers", [PROGRAMS / "trainer.py", "fsdp"], [0], [FINITE]),
    "DeepSpeed, ZeRO-1": ("deepspeed", [PROGRAMS / "zero_stages.py", 1], [0], ["deepspeed/runtime/utils.py:", FINITE]),
    "DeepSpeed, ZeRO-3": ("deepspeed", [PROGRAMS / "zero_stages.py", 3], [0], ["deepspeed/runtime/utils.py:", FINITE]),
    "torchtitan, FSDP2 and TP": ("torchtitan", FSDP_AND_TP, [0], []),
    "torchtitan, a pipeline": ("torchtitan", PIPELINE, [0, 32], []),
    "Megatron-core, TP and PP": (
        *("megatron", [PROGRAMS / "megatron_gpt.py", 4, 4], [0, 16, 32, 48]),
        ["megatron/core/utils.py:"],
    ),
}


@pytest.fixture
def folder(tmp_path):
    """With what torchtitan reads."""
    (tmp_path / "titan.toml").write_text(TITAN)
    (tmp_path / "texts").mkdir()
    lines = [json.dumps({"text": "the cat sat on a mat " * 50}) for _ in range(500)]
    (tmp_path / "texts" / "data.json").write_text("\n".join(lines))
    words = {word: i for i, word in enumerate(["<unk>", "<bos>", "<eos>", *"the cat sat on a mat".split()])}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": words[word], "content": word, **special} for word in ("<bos>", "<eos>")],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_program_is_planned_for_64_gpus_as_it_is_started(name, folder):
    library, program, run, assumed = PLANS[name]
    if find_spec(library) is None:
        pytest.skip(f"no {library}")
    said = ranks.python(*ranks.VIRTUAL, "plan", "-n", 64, "--json", *program, folder=folder).stdout
    plan = json.loads(said)
    assert [rank["rank"] for rank in plan["ranks"]] == run
    assert len(plan["values"]) == len(assumed)
    assert all(map(str.startswith, plan["values"], assumed)), plan["values"]
    for rank in plan["ranks"]:
        assert rank["time"]["forward"]["seconds"] > 0 and rank["time"]["other kernels"]["seconds"] > 0
        assert rank["memory"]["parameters"] > 0 and rank["memory"]["optimizer state"] > 0
