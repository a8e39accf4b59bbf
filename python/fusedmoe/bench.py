"""python -m fusedmoe.bench: the experts of one layer beside everything else that is installed.

Peers: transformers' implementations, PyTorch's grouped_mm and scaled_grouped_mm, vLLM's
fused_experts and triton_kernels. With a quantized --scheme they compute with the same values
widened to the dtype; triton_kernels with mxfp4_w4a16 and scaled_grouped_mm with fp8_channel_token
use the quantized ones. Prints a table; --json and --plot write files. Percent of roofline: the time
that the touched experts' bytes and the multiplications take at the bandwidth and throughput
measured here, over the time taken.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, cast

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise SystemExit("fusedmoe.bench needs PyTorch: pip install torch") from error

import fusedmoe
from fusedmoe import _core
from fusedmoe._peers import Candidate, peers
from fusedmoe._problem import DTYPES, SHAPES, Problem

OWN = "fusedmoe"


def _candidates(problem: Problem) -> Dict[str, Candidate]:
    """What may run the problem, by name; the first is fusedmoe."""
    layer = fusedmoe.MoELayer.from_tensors(
        *problem.stored,
        topk=problem.topk,
        weights=cast(fusedmoe.ExpertSettings, problem.settings),
        dtype=problem.dtype_name,
        device=str(problem.device),
    )
    return {OWN: layer.forward_routed, **peers(problem)}


def times_of(call: Callable[[], Any], device: torch.device, min_time: float) -> List[float]:
    """Seconds of each call, after one that does not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    times: List[float] = []
    until = time.perf_counter() + min_time
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return times


def limits_of(problem: Problem) -> Tuple[float, float]:
    """Bytes and floating-point operations per second: of reading memory, and of products in
    registers on the CPU, or of a large product on a GPU."""
    large = problem.probe
    if problem.device.type == "cpu":
        found = []
        for _ in range(2):
            time.sleep(0.1)  # until PyTorch's threads sleep too: they would share the cores
            found.append(_core.cpu_limits(large, problem.dtype_name))
        return max(bandwidth for bandwidth, _ in found), max(flops for _, flops in found)
    bandwidth = large.nbytes / min(times_of(large.sum, problem.device, 0.1))
    a = torch.ones(8192, 8192, dtype=problem.dtype, device=problem.device)
    return bandwidth, 2 * 8192**3 / min(times_of(lambda: a @ a, problem.device, 0.1))


def measure(
    problem: Problem, tokens: List[int], min_time: float, only: Optional[List[str]]
) -> Dict[str, Any]:
    """Everything that the table and the pictures show."""
    stored = problem.stored + tuple(
        tensor for tensor in problem.settings.values() if isinstance(tensor, torch.Tensor)
    )
    bytes_per_expert = sum(tensor.nbytes for tensor in stored) / problem.experts
    rows: List[Dict[str, Any]] = []
    found = {name: call for name, call in _candidates(problem).items() if not only or name in only}
    limits = [limits_of(problem)]
    for count in tokens:
        inputs = problem.routed(count)
        touched = inputs[2].unique().numel()
        flops = 6 * count * problem.topk * problem.hidden * problem.intermediate
        expected: Optional[torch.Tensor] = None
        for name, call in found.items():
            row: Dict[str, Any] = {"tokens": count, "name": name}
            rows.append(row)
            try:
                output = call(*inputs).float()
            except Exception as error:  # of a peer's, whatever it is
                if name == OWN:
                    raise
                row["error"] = f"{type(error).__name__}: {error}".split("\n")[0][:120]
                continue
            expected = output if expected is None else expected
            seconds = statistics.median(times_of(lambda: call(*inputs), problem.device, min_time))
            limits.append(limits_of(problem))
            # The better of before and after: the host of a virtual machine moves its cores.
            bandwidth, throughput = (max(pair) for pair in zip(*limits[-2:]))
            roofline = max(touched * bytes_per_expert / bandwidth, flops / throughput)
            row.update(
                us=seconds * 1e6,
                percent_of_roofline=100 * roofline / seconds,
                touched_experts=touched,
                bytes_per_s=bandwidth,
                flops_per_s=throughput,
                difference=float((output - expected).abs().max() / expected.abs().max()),
            )
            print(_line(row), flush=True)
    return {
        "environment": environment(problem.device),
        "shape": dict(zip(("experts", "topk", "hidden", "intermediate"), problem.shape)),
        "dtype": problem.dtype_name,
        "scheme": problem.scheme or problem.dtype_name,
        "rows": rows,
    }


def environment(device: torch.device) -> Dict[str, Any]:
    name = f"{torch.get_num_threads()} threads, {platform.machine()} {fusedmoe.cpu_isa()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "fusedmoe": fusedmoe.__version__,
        "torch": torch.__version__,
        "device": name,
        "cpu_isa": fusedmoe.cpu_isa(),
        "threads": torch.get_num_threads(),
    }


def _line(row: Dict[str, Any]) -> str:
    return (
        f"{row['tokens']:7} {row['name']:18}{row['us']:12.1f} us"
        f"{row['percent_of_roofline']:8.1f} %{row['difference']:12.1e}"
    )


def plot(results: Dict[str, Any], path: str) -> None:
    """Time and percent of roofline against tokens."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fusedmoe"})
    import matplotlib.pyplot as plt

    figure, (times, percents) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    rows = [row for row in results["rows"] if "us" in row]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        tokens = [row["tokens"] for row in own]
        style = {"label": name, "marker": "o", "linewidth": 2.5 if name == OWN else 1.2}
        times.plot(tokens, [row["us"] / 1000 for row in own], **style)
        percents.plot(tokens, [row["percent_of_roofline"] for row in own], **style)
    for axes, label in ((times, "milliseconds"), (percents, "percent of roofline")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["tokens"] for row in rows}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    times.set_yscale("log")
    percents.set_ylim(bottom=0)
    times.legend()
    shape = ", ".join(f"{key} {value}" for key, value in results["shape"].items())
    figure.suptitle(f"{results['scheme']}, {shape}; {results['environment']['device']}")
    figure.savefig(path)
    plt.close(figure)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedmoe.bench", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    for name in ("experts", "topk", "hidden", "intermediate"):
        parser.add_argument(f"--{name}", type=int, help="default: that of the shape")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--scheme", help="of fusedmoe's weights, as mxfp4_w4a16")
    parser.add_argument("--device", default="cpu", help='"cpu" (default) or "cuda:0"')
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these candidates")
    parser.add_argument("--min-time", type=float, default=0.3, help="seconds each, default 0.3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help=".png, .svg or .pdf; needs matplotlib")
    args = parser.parse_args(arguments)
    print(" tokens name                      median  roofline  difference")
    with torch.no_grad():
        results = measure(Problem(args), args.tokens, args.min_time, args.only)
    failed: Dict[str, List[str]] = {}
    for row in results["rows"]:
        if "error" in row:
            failed.setdefault(f"{row['name']}: {row['error']}", []).append(str(row["tokens"]))
    for what, counts in failed.items():
        print(f"did not run {' '.join(counts)} tokens: {what}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    if args.plot:
        plot(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
