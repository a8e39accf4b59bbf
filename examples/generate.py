"""Streams text from a model whose experts stay in their published format.

    python examples/generate.py gpt-oss-20b/ "Mixture of experts means" --new-tokens 64

A folder without a tokenizer gets the ids 1, 2, 3 as its prompt, and ids are printed.
"""

import argparse

import torch
import transformers

from fusedmoe.integrations.transformers import from_pretrained


class PrintIds(transformers.generation.streamers.BaseStreamer):
    def put(self, value):
        print(*value.flatten().tolist(), end=" ", flush=True)

    def end(self):
        print()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder")
parser.add_argument("prompt", nargs="?", default="Mixture of experts means")
parser.add_argument("--new-tokens", type=int, default=64)
parser.add_argument("--device", default="cpu", help='"cpu" (default) or "cuda:0"')
args = parser.parse_args()

model = from_pretrained(args.folder, device=args.device)
try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    inputs = tokenizer(args.prompt, return_tensors="pt").input_ids
    streamer = transformers.TextStreamer(tokenizer)
except (OSError, ValueError, KeyError):
    inputs, streamer = torch.tensor([[1, 2, 3]]), PrintIds()
with torch.no_grad():
    model.generate(inputs.to(args.device), max_new_tokens=args.new_tokens, streamer=streamer)
