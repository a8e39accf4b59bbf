"""vLLM's offline class LLM with the plugin, on small models, where vLLM is built for the CPU.

Each run is a process of its own: vLLM calls its plugins once. It finds ours by the metadata of the
package, as where pip has installed it.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
if not pytest.importorskip("vllm.platforms").current_platform.is_cpu():
    pytest.skip("vLLM is not built for the CPU", allow_module_level=True)

import fusedmoe  # noqa: E402
from fusedmoe import demo  # noqa: E402

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams


def experts(model):
    kernels = [getattr(getattr(m, "quant_method", None), "moe_kernel", None) for m in model.modules()]
    return [type(kernel.fused_experts).__name__ for kernel in kernels if kernel is not None]


llm = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, enforce_eager=True)
sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, prompt_logprobs=0)
prompts = [{"prompt_token_ids": list(range(first, 2 * first))} for first in (16, 9)]
outputs = llm.generate(prompts, sampling, use_tqdm=False)
scores = [next(iter(at.values())).logprob for out in outputs for at in out.prompt_logprobs if at]
tokens = [list(out.outputs[0].token_ids) for out in outputs]
print(json.dumps({"experts": llm.apply_model(experts)[0], "scores": scores, "tokens": tokens}))
"""


def install_metadata(folder):
    version, project = fusedmoe.__version__, pathlib.Path(__file__).parents[2] / "pyproject.toml"
    metadata = folder / f"fusedmoe-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fusedmoe\nVersion: {version}\n")
    plugin = re.search(r'^fusedmoe = "(.*)"$', project.read_text(), re.MULTILINE).group(1)
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\nfusedmoe = {plugin}\n")


def generate(model, folder, chosen):
    environment = {
        **os.environ,
        "FUSEDMOE_VLLM": chosen,
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [sys.executable, "-c", PROGRAM, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def make_mixtral(folder):
    config = transformers.AutoConfig.for_model(
        "mixtral", vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def make_gpt_oss(folder):
    folder.mkdir()
    sizes = dict(layers=2, hidden=256, intermediate=256, experts=8, topk=2, vocabulary=512)
    demo.make_model(folder, **sizes)


@pytest.mark.parametrize("make", [make_mixtral, make_gpt_oss])
def test_a_served_model_runs_our_experts(make, tmp_path):
    make(tmp_path / "model")
    install_metadata(tmp_path)
    ours, theirs = (generate(tmp_path / "model", tmp_path, chosen) for chosen in ("1", "0"))
    assert ours["experts"] == 2 * ["FusedMoeExperts"]
    assert theirs["experts"] and "FusedMoeExperts" not in theirs["experts"]
    assert max(abs(a - b) for a, b in zip(ours["scores"], theirs["scores"])) < 0.05
    assert [len(tokens) for tokens in ours["tokens"]] == [8, 8]
