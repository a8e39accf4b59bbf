"""Models of transformers whose experts come straight from the checkpoint's files."""

from __future__ import annotations

import gc
import json
import os
import re
from typing import Any, Dict, Iterator, List, Tuple, Union

import torch
import transformers

from ..checkpoint import Checkpoint
from ..layer import MoELayer
from ._experts import DTYPES, FusedExperts
from ._llama4 import register_llama4

_EXPERTS_TENSOR = r"(^|\.)experts\."
# Ends of the names of tensors that belong to a quantized linear layer.
_QUANTIZED = re.compile(r"(_scale|_scale_inv|_scales|_packed|\.scales|\.qweight|_blocks)$")


def from_pretrained(
    path: "Union[str, os.PathLike[str]]",
    *,
    dtype: Union[torch.dtype, str] = "auto",
    device: str = "cpu",
    options: "Dict[str, Any] | None" = None,
    **kwargs: Any,
) -> Any:
    """The transformers model of a checkpoint, with its experts by fusedmoe.

    The experts go from the files into the packed form, layer by layer, in the scheme they were
    published in. transformers loads everything else, and decodes what else is quantized.

    The model cannot be saved: its folder holds what it was made of.

    Args:
        path: a folder with config.json and *.safetensors.
        dtype: of all other weights and of the hidden states; "auto": that of the config.
        device: of the whole model, "cpu" or "cuda:0".
        options: of the layers, see MoELayer.from_checkpoint().
        **kwargs: of transformers' from_pretrained(), as attn_implementation.

    Raises:
        OSError: for files at fault.
        NotImplementedError: for a model or a scheme that fusedmoe cannot serve.
        Exception: what transformers raises for the rest.
    """
    folder = os.fspath(path)
    checkpoint = Checkpoint(folder, read_files=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    if dtype == "auto":
        text_dtype = getattr(config.get_text_config(), "dtype", None)
        dtype = config.dtype or text_dtype or torch.bfloat16
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if dtype not in DTYPES:
        raise NotImplementedError(f"fusedmoe: hidden states of {dtype}")
    layer_options = {"device": device, "dtype": DTYPES[dtype], **(options or {})}
    layers = {
        index: MoELayer.from_checkpoint(checkpoint, index, experts_only=True, **layer_options)
        for index in checkpoint.moe_layers
        if index < config.get_text_config().num_hidden_layers
    }
    _keep_quantizer_of_the_rest(config, checkpoint)
    published = _class_of(config)
    register_llama4("fusedmoe")
    model_class = _without_experts(published, layers)
    model = model_class.from_pretrained(
        folder, config=config, dtype=dtype, device_map=None if device == "cpu" else device, **kwargs
    )
    model.__class__ = published
    model.save_pretrained = _refuse_to_save
    gc.collect()  # cycles hold memory of the loading
    return model


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("fusedmoe: the experts are packed; copy the folder they came from")


def _class_of(config: Any) -> Any:
    names = config.architectures or []
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise NotImplementedError(f"transformers has none of the config's architectures {names}")


def _without_experts(published: Any, layers: Dict[int, MoELayer]) -> Any:
    """The model class, but for its experts, which are `layers` and have no parameters."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        published.__init__(self, *args, **kwargs)
        left = dict(layers)
        for name, module in list(_experts_modules(self)):
            index = _layer_number(name)
            if index not in left:
                raise NotImplementedError(
                    f"fusedmoe: {name} has experts, which the checkpoint has in {sorted(layers)}"
                )
            parent, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(parent), attribute, FusedExperts(left.pop(index)))
        if left:
            raise NotImplementedError(
                f"fusedmoe: {published.__name__} has no experts module in layers {sorted(left)}"
            )
        ignored = set(self._keys_to_ignore_on_load_unexpected or [])
        self._keys_to_ignore_on_load_unexpected = ignored | {_EXPERTS_TENSOR}

    members = {"__init__": __init__, "__module__": published.__module__}
    return type(published.__name__, (published,), members)


def _experts_modules(model: torch.nn.Module) -> Iterator[Tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            yield name, module


def _layer_number(name: str) -> int:
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found.group(1)) if found else -1


def _keep_quantizer_of_the_rest(config: Any, checkpoint: Checkpoint) -> None:
    """Leaves transformers a quantization_config only where more than the experts is quantized."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings is None:
            continue
        if not any(_QUANTIZED.search(name) for name in _other_names(checkpoint)):
            del part.quantization_config
        elif isinstance(settings, dict) and settings.get("quant_method") == "fp8":
            settings["dequantize"] = True  # its kernels are for GPUs


def _other_names(checkpoint: Checkpoint) -> List[str]:
    """Names of all tensors but those of routed experts, of the headers of the files."""
    names: List[str] = []
    for path in checkpoint.files:
        if path.endswith(".safetensors"):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                names += json.loads(file.read(size))
    return [name for name in names if not re.search(_EXPERTS_TENSOR, name)]
