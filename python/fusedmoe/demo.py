"""python -m fusedmoe.demo: tokens from a random gpt-oss model, beside transformers' own experts.

Makes a model of transformers with experts in MXFP4, runs it in a process of its own with fusedmoe
and with each implementation of transformers, and prints what each takes: tokens per second by the
middle decode step, and the time of an experts module in one. Peak memory is that of the process, on
a GPU that of the GPU. For fusedmoe on the CPU also the time that the bytes of a token's experts take
at the measured bandwidth, in percent of the time taken. "f32" are transformers' eager experts in
f32, in a model that is bf16 otherwise: from its logits the column "error" measures how far those of
the others are; with many layers of random weights routing soon differs, and it says little. Needs
torch and transformers. The published size of a layer: --hidden 2880 --intermediate 2880 --experts 32
--vocabulary 201088 --layers 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

OWN, EXACT = "fusedmoe", "f32"
IMPLEMENTATIONS = (EXACT, OWN, "grouped_mm", "batched_mm", "eager")
WHY = """
Greedy tokens differ where two logits are nearer to each other than an implementation is to exact
arithmetic, often soon in a model with random weights. fusedmoe adds in f32 and rounds to bf16
twice: the activated rows, and the sum over a token's experts. transformers' rows are rounded to
bf16 after each step: product, bias, parts of the activation, weight, each addition. The column
error says how far that takes the logits of the prompt (root mean square over that of the logits)
from those of experts in f32, which are run first."""
_PROBED = 40  # tokens
_NEEDED = ("torch", "transformers", "safetensors")


def make_model(folder: "str | os.PathLike[str]", **sizes: int) -> int:
    """Writes a gpt-oss model with random weights; returns the bytes of its tensors.

    sizes: layers, hidden, intermediate, experts, topk, vocabulary.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    hidden, intermediate, experts = sizes["hidden"], sizes["intermediate"], sizes["experts"]
    config = transformers.AutoConfig.for_model(
        "gpt_oss",
        num_hidden_layers=sizes["layers"],
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_local_experts=experts,
        num_experts_per_tok=sizes["topk"],
        vocab_size=sizes["vocabulary"],
        head_dim=64,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=None,
        dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    generator = torch.Generator().manual_seed(0)

    def random_bytes(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    tensors: Dict[str, torch.Tensor] = {}
    for name, like in shapes.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            rows, columns = like.shape[2], like.shape[1]  # stored (out, in)
            blocks = (experts, rows, columns // 32)
            tensors[name + "_blocks"] = random_bytes(0, 256, *blocks, 16)
            tensors[name + "_scales"] = random_bytes(119, 122, *blocks)
        elif "norm" in name:
            tensors[name] = torch.ones(like.shape, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.empty(like.shape, dtype=torch.bfloat16)
            tensors[name].normal_(std=0.02, generator=generator)
    config.save_pretrained(folder)
    save_file(tensors, pathlib.Path(folder) / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def run(
    folder: str, implementation: str, new_tokens: int, prompts: Sequence[int], device: str = "cpu"
) -> Dict[str, Any]:
    """Loads the model and generates; returns seconds, tokens and peak memory.

    prompts: lengths; the first is the one that tokens are generated from.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    started = time.perf_counter()
    model = _load(folder, implementation, device)
    loaded = time.perf_counter()
    longest = torch.arange(max(prompts), device=device)[None] % model.config.vocab_size
    prompt = longest[:, : prompts[0]]
    with torch.no_grad():
        logits = model(prompt).logits.float()  # packs, allocates
        torch.save(logits.cpu(), _logits_file(folder, implementation))
        _generate(model, prompt, 4)
        tokens, ends = _generate(model, prompt, new_tokens)
        steps = [after - before for before, after in zip(ends[1:], ends[2:])]
        rates = [_prompt_rate(model, longest[:, :length]) for length in prompts]
        peak_bytes = _peak_bytes(device)
        experts_ms = _experts_ms(model, prompt, device)
        probed = implementation == OWN and device == "cpu"
        percents = _percents_of_bandwidth(model, prompt) if probed else []
    return {
        "implementation": implementation,
        "load_s": loaded - started,
        "prompt_tokens_per_s": rates,
        "decode_tokens_per_s": 1 / statistics.median(steps),
        "experts_ms": experts_ms,
        "peak_bytes": peak_bytes,
        "percent_of_bandwidth": statistics.median(percents) if percents else None,
        "tokens": tokens[0, prompts[0] :].tolist(),
    }


def _load(folder: str, implementation: str, device: str) -> Any:
    import torch
    import transformers

    if implementation == OWN:
        from fusedmoe.integrations.transformers import from_pretrained

        return from_pretrained(folder, device=device)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map=None if device == "cpu" else device,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        experts_implementation="eager" if implementation == EXACT else implementation,
    )
    if implementation == EXACT:
        _experts_in_f32(model)
    return model


def _generate(model: Any, prompt: Any, new_tokens: int) -> Tuple[Any, List[float]]:
    """All tokens, and when the prompt was taken and each new one was there."""
    import transformers

    ends: List[float] = []

    class Clock(transformers.generation.streamers.BaseStreamer):
        def put(self, value: Any) -> None:  # in host memory: the GPU has done it
            ends.append(time.perf_counter())

        def end(self) -> None: ...

    tokens = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, streamer=Clock())
    return tokens, ends


def _prompt_rate(model: Any, prompt: Any) -> Optional[float]:
    """Tokens per second up to the first new one, of three runs the middle; None: out of memory."""
    import torch

    seconds = []
    try:
        for _ in range(3):
            _, (begin, end) = _generate(model, prompt, 1)
            seconds.append(end - begin)
    except torch.OutOfMemoryError:
        return None
    return float(prompt.shape[1] / statistics.median(seconds))


def _experts_ms(model: Any, prompt: Any, device: str) -> float:
    """Of one experts module in a decode step the median, with nothing else on the device."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    begin: List[float] = []
    times: List[float] = []

    def before(*_: Any) -> None:
        wait()
        begin.append(time.perf_counter())

    def after(*_: Any) -> None:
        wait()
        times.append(time.perf_counter() - begin[-1])

    modules = [layer.mlp.experts for layer in model.model.layers]
    hooks = [module.register_forward_pre_hook(before) for module in modules]
    hooks += [module.register_forward_hook(after) for module in modules]
    _generate(model, prompt, _PROBED)
    for hook in hooks:
        hook.remove()
    return 1e3 * statistics.median(times[len(modules) :])  # behind the prompt


def _peak_bytes(device: str) -> int:
    """Resident memory of the process at its peak; of a GPU, whose allocators give nothing back, what
    is not free."""
    import torch

    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _logits_file(folder: "str | os.PathLike[str]", implementation: str) -> pathlib.Path:
    return pathlib.Path(folder) / f"{implementation}.logits"


def _experts_in_f32(model: Any) -> None:
    """The experts modules in f32; what goes in is widened, what comes out rounded to bf16."""
    import torch

    def widened(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.float() if floats else value

    for layer in model.model.layers:
        layer.mlp.experts.float()
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args, named: (
                tuple(map(widened, args)),
                {name: widened(value) for name, value in named.items()},
            ),
            with_kwargs=True,
        )
        layer.mlp.experts.register_forward_hook(lambda _, args, out: out.to(torch.bfloat16))


def _error(folder: "str | os.PathLike[str]", implementation: str) -> Optional[float]:
    """How far the logits are from those with experts in f32, where these were computed."""
    import torch

    exact_file = _logits_file(folder, EXACT)
    if not exact_file.exists():
        return None
    exact = torch.load(exact_file)
    difference = torch.load(_logits_file(folder, implementation)) - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())


def _percents_of_bandwidth(model: Any, prompt: Any) -> List[float]:
    """For each decode step and layer: what the experts' bytes need at the bandwidth of all threads,
    over the time of the experts module. Leaves out steps around which the bandwidth changed."""
    import transformers

    from . import _core
    from ._problem import cpu_probe
    from .integrations.transformers import FusedExperts

    config = model.config
    begin: List[float] = []
    times: List[float] = []
    values = 3 * config.num_experts_per_tok * config.hidden_size * config.intermediate_size
    nbytes = values * 17 / 32  # MXFP4: half a byte each, and a scale for each 32
    probe = cpu_probe()
    for module in model.modules():
        if isinstance(module, FusedExperts):
            module.register_forward_pre_hook(lambda *_: begin.append(time.perf_counter()))
            module.register_forward_hook(lambda *_: times.append(time.perf_counter() - begin[-1]))
    steps: List[Any] = []

    class Probe(transformers.generation.streamers.BaseStreamer):
        def put(self, value: Any) -> None:
            time.sleep(0.02)  # until PyTorch's threads sleep: they would share the cores
            steps.append((list(times), _core.cpu_limits(probe, "bf16")[0]))
            times.clear()

        def end(self) -> None: ...

    model.generate(prompt, max_new_tokens=_PROBED, do_sample=False, streamer=Probe())
    return [
        100 * nbytes / max(before, after) / seconds
        for (_, before), (step, after) in zip(steps[2:], steps[3:])
        if abs(after - before) < 0.08 * before
        for seconds in step
    ]


def _measured(folder: str, implementation: str, args: argparse.Namespace) -> Dict[str, Any]:
    """What run() returns in a process of its own: peak memory is that of a process. Where transformers
    cannot run its implementation here, the reason instead."""
    command = [sys.executable, "-m", "fusedmoe.demo", "--run", folder, implementation]
    command += ["--new-tokens", str(args.new_tokens), "--device", args.device]
    command += ["--prompts", *map(str, args.prompts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        result = json.loads(done.stdout.splitlines()[-1])
        return {**result, "error": _error(folder, implementation)}
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if implementation == OWN:
        raise SystemExit(done.stderr)
    return {"implementation": implementation, "failure": lines[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedmoe.demo", description=__doc__)
    sizes = dict(layers=4, hidden=768, intermediate=768, experts=32, topk=4, vocabulary=8192)
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    parser.add_argument("--new-tokens", type=int, default=64, help="default 64, at least 2")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16], help="lengths; default 16")
    parser.add_argument("--device", default="cpu", help='"cpu" (default) or "cuda:0"')
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS)
    parser.add_argument("--json", action="store_true", help="print JSON, and the lines to stderr")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # one measurement: see below
    args = parser.parse_args()
    if missing := [each for each in _NEEDED if importlib.util.find_spec(each) is None]:
        raise SystemExit(f"fusedmoe.demo needs more packages: pip install {' '.join(missing)}")
    if args.run:
        folder, implementation = args.run
        result = run(folder, implementation, args.new_tokens, args.prompts, args.device)
        print(json.dumps(result))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        nbytes = make_model(folder, **{name: getattr(args, name) for name in sizes})
        table = sys.stderr if args.json else sys.stdout
        print(f"a random gpt-oss model of {nbytes / 1e6:.0f} MB, experts in MXFP4", file=table)
        print(_heading(args.prompts), file=table, flush=True)
        results = []
        for implementation in sorted(args.implementations, key=lambda name: name != EXACT):
            result = _measured(folder, implementation, args)
            results.append(result)
            print(_line(result), file=table, flush=True)
    if args.json:
        print(json.dumps({"model_bytes": nbytes, **vars(args), "results": results}, indent=1))
    elif EXACT in args.implementations:
        print(WHY)
    return 0


def _heading(prompts: Sequence[int]) -> str:
    rates = "".join(f"{f'tok/s of {length}':>16}" for length in prompts)
    return (
        f"experts by    load s{rates}  decode tok/s  experts ms  peak MB  bandwidth   error  tokens"
    )


def _line(result: Dict[str, Any]) -> str:
    if "failure" in result:
        return f"{result['implementation']:12}  {result['failure']}"
    percent = result["percent_of_bandwidth"]
    share = "-" if percent is None else f"{percent:.0f} %"
    error = "-" if result["error"] is None else f"{100 * result['error']:.2f} %"
    rates = result["prompt_tokens_per_s"]
    return (
        f"{result['implementation']:12}{result['load_s']:8.1f}"
        + "".join(f"{'-' if rate is None else f'{rate:.1f}':>16}" for rate in rates)
        + f"{result['decode_tokens_per_s']:14.1f}{result['experts_ms']:12.3f}"
        f"{result['peak_bytes'] / 1e6:9.0f}{share:>11}{error:>8}  {result['tokens'][:6]}"
    )


if __name__ == "__main__":
    sys.exit(main())
