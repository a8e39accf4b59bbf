"""Tiny models of every MoE type that transformers has, with random weights.

build(model_type) returns the model and its MoE block; expected(block, x) what the block computes.
Weights are multiples of 1/16, so that bf16 holds them exactly.
"""

import collections
import inspect
import re

import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

# shared: the width of shared experts.
Sizes = collections.namedtuple("Sizes", "hidden width shared experts layers",
                               defaults=(32, 16, 24, 8, 2))
TOPK = 2


def fields(sizes):
    """Of every config class that has the field."""
    hidden, width, shared, experts, layers = sizes
    return dict(
        hidden_size=hidden, d_model=hidden, intermediate_size=width, ffn_hidden_size=width,
        expert_ffn_hidden_size=width, moe_intermediate_size=width, num_hidden_layers=layers,
        num_layers=layers, n_layers=layers, num_attention_heads=4, n_heads=4,
        num_key_value_heads=4, head_dim=hidden // 4, vocab_size=64, n_routed_experts=experts,
        num_experts=experts, num_local_experts=experts, moe_num_experts=experts,
        num_experts_per_tok=TOPK, moe_topk=TOPK, moe_top_k=TOPK, moe_k=TOPK, top_k_experts=TOPK,
        num_experts_per_token=TOPK, n_group=2, num_expert_group=2, topk_group=1,
        n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1,
        shared_expert_intermediate_size=shared, shared_intermediate_size=shared,
        share_expert_dim=shared, moe_shared_expert_intermediate_size=shared,
        shared_experts_intermediate_size=shared, first_k_dense_replace=0, num_dense_layers=0,
        decoder_sparse_step=1, mlp_only_layers=[], mlp_layer_types=["sparse"] * layers,
        moe_layer_start_index=0, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=8, qk_head_dim=8, depth=1, num_heads=2, out_hidden_size=hidden, embed_dim=32,
        image_size=28, patch_size=14, encoder_layers=1, encoder_attention_heads=2,
        num_position_embeddings=16,
    )  # fmt: skip


# What else a type needs; "text": of its text_config. mistral4 and others choose among groups by a
# rule of their own, so they have one group.
ONE_GROUP = dict(n_group=1, topk_group=1)
MORE = {
    "deepseek_v4": dict(mlp_layer_types=["moe", "moe"]),
    "mistral4": ONE_GROUP,
    "mistral_large4_text": ONE_GROUP,
    "mistral_large4": dict(vision_config=dict(
        model_type="pixtral", hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, image_size=28, patch_size=14)),
    "axk2": dict(n_group=None, topk_group=None),
    "lfm2_moe": dict(layer_types=["full_attention", "full_attention"]),
    "longcat_flash": dict(zero_expert_num=4),
    "gemma4_text": dict(enable_moe_block=True),
    "ernie4_5_vl_moe_text": dict(moe_intermediate_size=[16, 16]),
    "zaya": dict(num_experts_per_tok=1),
    "llama4_text": dict(num_experts_per_tok=1, interleave_moe_layer_step=1),
    "kolibri1": dict(norm_topk_prob=True),
    "glm5_next_text": dict(qk_rope_head_dim=0, qk_head_dim=4),
    "granitemoehybrid": dict(mamba_n_heads=4, mamba_d_head=16, mamba_expand=2,
                             layer_types=["attention", "attention"]),
    "hy_v4_vl_text": dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0,
                                               mrope_section=[1, 1, 0])),
    "dots3_note_vision_encoder": dict(adapter_in_dim=32, adapter_out_dim=32,
                                      mlp_layer_types=["dense", "dense"]),
    "dots3_note_audio_encoder": dict(adapter_input_size=32, adapter_out_dim=32),
}


# Further tiny models: name -> type, fields for sizes.
VARIANTS = {"nemotron_h_latent": ("nemotron_h", lambda sizes: dict(moe_latent_size=sizes.width))}


def config_of(name, sizes=Sizes()):
    """Of a type or a variant."""
    model_type, more = VARIANTS.get(name, (name, lambda sizes: {}))
    config = make_config(CONFIG_MAPPING[model_type], sizes)
    for key, value in more(sizes).items():
        setattr(config, key, value)
    return config


def make_config(cls, sizes=Sizes()):
    known = set(inspect.signature(cls.__init__).parameters)
    known |= set(getattr(cls, "__dataclass_fields__", {}))
    values = {key: value for key, value in fields(sizes).items() if key in known}
    values.update(MORE.get(cls.model_type, {}))
    for name, sub in getattr(cls, "sub_configs", {}).items():
        if inspect.isclass(sub) and sub is not AutoConfig and name in known:
            values[name] = make_config(sub, sizes).to_dict()
    config = cls(**values)
    if cls.model_type == "dbrx":
        config.attn_config.rope_theta = 10000.0  # transformers reads what its own class lacks
    return config


def model_class(config):
    names = ["MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"]
    if not getattr(type(config), "sub_configs", {}):
        names = []
    for name in names + ["MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_MAPPING"]:
        mapping = getattr(modeling_auto, name, None)
        if mapping is not None and type(config) in mapping.keys():
            return mapping[type(config)]
    raise ValueError("transformers has no model of this type")


def find_blocks(model):
    """The names of modules that hold experts, and these."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if ("experts" in children or "text_moe" in children) and "Attention" not in type(module).__name__:
            yield name, module
        elif "input_linear" in children and "router" in children:
            yield name, module  # JetMoE


def find_block(model):
    """The first one."""
    for found in find_blocks(model):
        return found
    raise ValueError("no layer with experts")


def layers(model):
    """The numbers of layers, and their blocks of experts."""
    return {int(re.search(r"\.(\d+)\.", name)[1]): block for name, block in find_blocks(model)}


def randomize(block, generator):
    with torch.no_grad():
        for name, tensor in list(block.named_parameters()) + list(block.named_buffers()):
            if not tensor.is_floating_point():
                continue
            values = torch.randint(-8, 9, tensor.shape, generator=generator) / 16
            tensor.copy_(values if "bias" not in name else values / 4)


def build(model_type, sizes=Sizes(), seed=1):
    torch.manual_seed(seed)
    config = config_of(model_type, sizes)
    model = model_class(config)._from_config(config).eval()
    name, block = find_block(model)
    generator = torch.Generator().manual_seed(seed)
    for _, every in find_blocks(model):
        randomize(every, generator)
    parent = model.get_submodule(name.rpartition(".")[0])
    shared = getattr(parent, "shared_mlp", None)  # Granite: beside the block
    if shared is not None:
        randomize(shared, generator)
    return model, block, shared


def expected(block, shared, x):
    """The layer's output; a norm inside the block that follows the sum is not part of the layer."""
    for name, child in block.named_children():
        if name == "post_mlp_layernorm":
            block.post_mlp_layernorm = torch.nn.Identity()
    with torch.no_grad():
        result = block(x[None])
        while isinstance(result, tuple):
            result = result[0]
        result = result.reshape(x.shape)
        return result if shared is None else result + shared(x)
