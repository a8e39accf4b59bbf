"""Small whole models of transformers with fusedmoe's experts, where torch and transformers are.

On the CPU in float32; on a GPU, whose kernels do not take float32, in bfloat16.
"""

import copy
import json
import os
import subprocess

import pytest
from conftest import devices

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

import fusedmoe  # noqa: E402
from fusedmoe.integrations import _experts  # noqa: E402
from fusedmoe.integrations.transformers import (  # noqa: E402
    FusedExperts,
    experts_forward,
    forget,
    from_pretrained,
    register,
)

COMMON = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
MODELS = {
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, head_dim=16),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16),
    "olmoe": dict(num_experts=8, num_experts_per_tok=2),
    "llama4_text": dict(
        num_local_experts=8, num_experts_per_tok=1, intermediate_size_mlp=96, head_dim=16,
        interleave_moe_layer_step=1,
    ),
    "granitemoe": dict(num_local_experts=8, num_experts_per_tok=2),
    "glm4_moe": dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1,
        first_k_dense_replace=1, head_dim=16, n_group=1, topk_group=1,
    ),
    "deepseek_v3": dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, num_key_value_heads=4,
    ),
}


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
OURS = {"cpu": "cpu", "cuda": "cuda:0"}


@pytest.fixture(params=devices())
def device(request):
    return request.param


def make(name, dtype=torch.float32, device="cpu", **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**COMMON, **MODELS[name], **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # some families start with zeros
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.1)
    return model.to(device)


def some_tokens(device, rows=2):
    return torch.arange(7 * rows, device=device).reshape(rows, 7) % 64


def relative_error(actual, expected):
    """Root mean square over a token's logits, the 0.8 quantile of the tokens: rounding may send one or
    two to another expert."""
    errors = (actual.float() - expected.float()).square().mean(-1).sqrt()
    return (errors / expected.float().square().mean().sqrt()).flatten().quantile(0.8)


def assert_near(actual, expected):
    assert actual.dtype == expected.dtype and actual.device == expected.device
    if actual.dtype == torch.float32:
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    else:
        assert relative_error(actual, expected) <= 0.05


@pytest.fixture(autouse=True)
def registered():
    register()
    with torch.no_grad():
        yield


def generate(model, implementation, new_tokens=32):
    """Logits of each step, (steps, batch, vocabulary), and the greedy tokens."""
    model.set_experts_implementation(implementation)
    tokens = some_tokens(model.device)
    result = model.generate(
        tokens, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )
    return torch.stack(result.logits), result.sequences


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_of_a_whole_model(name):
    model = make(name)
    expected, expected_tokens = generate(model, "eager")
    actual, actual_tokens = generate(model, "fusedmoe")
    assert_near(actual, expected)
    assert torch.equal(actual_tokens, expected_tokens)


def prompt_and_steps(model, implementation):
    """Logits of a prompt, and of three decode steps whose tokens are given."""
    model.set_experts_implementation(implementation)
    tokens = some_tokens(model.device)
    first = model(tokens[:, :4], use_cache=True)
    logits, cache = [first.logits], first.past_key_values
    for step in range(4, 7):
        logits.append(model(tokens[:, step : step + 1], past_key_values=cache).logits)
    return torch.cat(logits, 1).float()


NARROW = [("cpu", torch.bfloat16), ("cuda", torch.bfloat16), ("cuda", torch.float16)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device, dtype", [pair for pair in NARROW if pair[0] in devices()])
def test_narrow_types_are_as_near_as_they_can_be(name, device, dtype):
    model = make(name, dtype, device)
    expected = prompt_and_steps(copy.deepcopy(model).float(), "eager")

    def error(implementation):
        return relative_error(prompt_and_steps(model, implementation), expected)

    assert error("fusedmoe") <= 1.5 * error("eager") + 1e-3
    _, tokens = generate(model, "fusedmoe", 4)
    assert tokens.shape == (2, 7 + 4)


@pytest.mark.skipif("cuda" not in devices(), reason="no GPU")
def test_float32_on_a_gpu_is_refused():
    model = make("mixtral", device="cuda")
    model.set_experts_implementation("fusedmoe")
    with pytest.raises(NotImplementedError, match="f32"):
        model(some_tokens("cuda"))


def experts_of(model):
    return next(m for name, m in model.named_modules() if name.endswith(".experts"))


def test_weights_are_packed_again_when_they_change(device):
    model = make("mixtral", DTYPES[device], device)
    experts, tokens = experts_of(model), some_tokens(device, 1)

    def logits(implementation="fusedmoe"):
        model.set_experts_implementation(implementation)
        return model(tokens).logits

    def packed():
        return _experts._packed[experts].layer

    def replace():
        address = experts.down_proj.data_ptr()
        for _ in range(50):  # until the allocator gives the old address again
            experts.down_proj = torch.nn.Parameter(torch.randn_like(experts.down_proj) / 10)
            if experts.down_proj.data_ptr() == address:
                break

    def replace_data():
        experts.down_proj.data = torch.randn_like(experts.down_proj) / 10

    before = logits()
    first = packed()
    assert torch.equal(logits(), before) and packed() is first
    del first
    for change in (lambda: experts.down_proj.mul_(2), replace, replace_data):
        change()
        after, expected = logits(), logits("eager")
        assert not torch.equal(after, before)
        assert_near(after, expected)
    experts.down_proj.data.mul_(2)  # PyTorch does not count this
    forget(model)
    after, expected = logits(), logits("eager")
    assert_near(after, expected)
    assert torch.equal(copy.deepcopy(model)(tokens).logits, expected)


def test_weights_that_were_made_in_inference_mode(device):
    with torch.inference_mode():
        model, tokens = make("mixtral", DTYPES[device], device), some_tokens(device, 1)
        logits = {}
        for implementation in ("eager", "fusedmoe"):
            model.set_experts_implementation(implementation)
            logits[implementation] = model(tokens).logits
    assert_near(logits["fusedmoe"], logits["eager"])


def test_compiled_by_inductor_without_a_graph_break(device):
    model = make("qwen3_moe", DTYPES[device], device)
    model.set_experts_implementation("fusedmoe")
    experts = experts_of(model)
    inputs = torch.randn(5, 64), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
    x, ids, weights = (tensor.to(device) for tensor in inputs)
    x = x.to(DTYPES[device])
    compiled = torch.compile(lambda *args: experts(*args) * 2, fullgraph=True)
    assert torch.equal(compiled(x, ids, weights), experts(x, ids, weights) * 2)

    # Code that several layers share, as where each block of a model is compiled by itself.
    shared = torch.compile(lambda module, *args: module(*args), fullgraph=True, backend="aot_eager")
    for module in [m for name, m in model.named_modules() if name.endswith(".experts")]:
        assert torch.equal(shared(module, x, ids, weights), module(x, ids, weights))


def test_fake_tensors_are_not_computed_with():
    from torch._subclasses import FakeTensorMode

    model = make("mixtral")
    model.set_experts_implementation("fusedmoe")
    with FakeTensorMode() as mode:
        inputs = torch.empty(5, 64), torch.empty(5, 2, dtype=torch.long), torch.empty(5, 2)
        output = experts_of(model)(*inputs)
    assert output.fake_mode is mode and output.shape == (5, 64)


def test_bfloat16_and_ids_that_mean_no_expert(device):
    model = make("qwen3_moe", torch.bfloat16, device)
    experts = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts")
    x = torch.randn(5, 64, device=device).to(torch.bfloat16)
    ids = torch.tensor([[0, 8], [8, 8], [1, 2], [3, 4], [5, 6]], device=device)
    weights = torch.rand(5, 2, device=device).to(torch.bfloat16)
    experts.config._experts_implementation = "eager"
    expected = experts(x, ids.clamp(max=7), weights.masked_fill(ids == 8, 0)).float()
    actual = experts_forward(experts, x, ids, weights)
    assert actual.dtype == torch.bfloat16 and not actual[1].any()
    assert (actual.float() - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_what_cannot_be_served_says_why():
    model = make("mixtral")
    experts = next(m for m in model.modules() if type(m).__name__ == "MixtralExperts")
    x, ids, weights = torch.randn(1, 64), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
    experts.act_fn = torch.nn.Tanh()
    with pytest.raises(NotImplementedError, match="MixtralExperts has the activation Tanh"):
        experts_forward(experts, x, ids, weights)
    experts.has_post_expert_norm = True
    with pytest.raises(NotImplementedError, match="normalizes"):
        experts_forward(experts, x, ids, weights)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="no backward"):
        experts_forward(experts, x.requires_grad_(), ids, weights)


def save(model, path):
    """Writes the model as it is published; returns its tensors."""
    from safetensors.torch import load_file

    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


def same_logits(model, path, device):
    loaded = from_pretrained(path, dtype=DTYPES[device], device=OURS[device])
    assert isinstance(experts_of(loaded), FusedExperts) and type(loaded) is type(model)
    tokens = some_tokens(device)
    assert_near(loaded(tokens).logits, model.to(device, DTYPES[device])(tokens).logits)
    return loaded


@pytest.mark.parametrize("name", MODELS)
def test_experts_straight_from_a_checkpoint(name, tmp_path, device):
    model = make(name, DTYPES[device])  # no kernel of a GPU takes weights in float32
    save(model, tmp_path)
    loaded = same_logits(model, tmp_path, device)
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in model.parameters())
    with pytest.raises(NotImplementedError, match="packed"):
        loaded.save_pretrained(tmp_path / "again")
    tokens = some_tokens(device)
    assert torch.equal(copy.deepcopy(loaded)(tokens).logits, loaded(tokens).logits)


def write(path, tensors, quantization_config):
    """The folder's model with other tensors, and its config saying how they are quantized."""
    from safetensors.torch import save_file

    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, quantization_config=quantization_config)


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_experts_stay_in_mxfp4(tmp_path, device):
    model = make("gpt_oss")
    tensors = save(model, tmp_path)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        published = tensors.pop(name)  # (E, in, out)
        matrices = [fusedmoe.quantize_weights(w.T.contiguous(), "mxfp4_w4a16") for w in published]
        values, scales = ([torch.from_dlpack(m[part]) for m in matrices] for part in (0, 1))
        blocks = torch.stack(values)
        tensors[name + "_blocks"] = blocks.view(*blocks.shape[:-1], -1, 16)
        tensors[name + "_scales"] = torch.stack([s.view(torch.uint8) for s in scales])
        decoded = [
            torch.from_dlpack(fusedmoe.dequantize_weights(m, "mxfp4_w4a16", published.shape[1]))
            for m in matrices
        ]
        model.get_parameter(name).copy_(torch.stack(decoded).transpose(1, 2))
    write(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    loaded = same_logits(model, tmp_path, device)
    assert experts_of(loaded).layer.info["scheme"] == "mxfp4_w4a16"


def test_what_else_is_quantized_is_decoded_by_transformers(tmp_path):
    pytest.importorskip("accelerate")
    model = make("deepseek_v3")
    tensors = save(model, tmp_path)
    decoded = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        matrix = fusedmoe.quantize_weights(tensors[name], "fp8_block")
        columns = tensors[name].shape[1]
        decoded[name] = torch.from_dlpack(fusedmoe.dequantize_weights(matrix, "fp8_block", columns))
        tensors[name] = torch.from_dlpack(matrix.values.view("u8")).view(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.from_dlpack(matrix.scales)
    write(tmp_path, decoded, None)
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    blocks = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write(tmp_path, tensors, {"quant_method": "fp8", **blocks})
    loaded, tokens = from_pretrained(tmp_path, dtype=torch.float32), torch.arange(14)[None]
    assert experts_of(loaded).layer.info["scheme"] == "fp8_block"
    expected, actual = model(tokens).logits, loaded(tokens).logits
    # What remains is that the scheme quantizes activations.
    assert (actual - expected).square().mean() <= 0.05**2 * expected.square().mean()


def test_folders_that_cannot_be_served_say_why(tmp_path):
    with pytest.raises(OSError):
        from_pretrained(tmp_path)
    model = make("mixtral")
    save(model, tmp_path)
    with pytest.raises(NotImplementedError, match="torch.float64"):
        from_pretrained(tmp_path, dtype="float64")
    with pytest.raises(NotImplementedError, match="none of the config's architectures"):
        change_config(tmp_path, architectures=["Nothing"])
        from_pretrained(tmp_path)


@pytest.mark.skipif("FUSEDMOE_PROGRAM" not in os.environ, reason="writes checkpoints")
@pytest.mark.parametrize(
    "scheme, layout, tolerance",
    [
        ("int8_channel", "compressed-tensors", 0.05),
        ("int4_g32", "gptq", 0.4),
        ("int4_g32_zp", "awq", 0.4),
        ("nvfp4_w4a16", "compressed-tensors", 0.4),
    ],
)
def test_published_layouts(scheme, layout, tolerance, tmp_path, device):
    model = make("qwen3_moe", moe_intermediate_size=64)
    save(model, tmp_path / "wide")
    command = [os.environ["FUSEDMOE_PROGRAM"], "quantize", "--checkpoint", tmp_path / "wide"]
    command += ["--scheme", scheme, "--layout", layout, "--output", tmp_path / "narrow"]
    subprocess.run(command, check=True, capture_output=True)
    dtype = DTYPES[device]
    loaded = from_pretrained(tmp_path / "narrow", dtype=dtype, device=OURS[device])
    assert experts_of(loaded).layer.info["scheme"] == scheme
    tokens = some_tokens(device)
    expected, actual = model.to(device)(tokens).logits, loaded(tokens).logits.float()
    assert (actual - expected).square().mean() <= tolerance**2 * expected.square().mean()
