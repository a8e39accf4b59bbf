#!/usr/bin/env python3
"""Makes docs/support-matrix.md of what `fusedmoe explain --matrix` prints: schemes in a table for each
task, with icons. Reads stdin, writes stdout.
"""
import re
import sys

BITS = {"e2m1": 4, "i4": 4, "iq4": 4, "e4m3": 8, "i8": 8, "u8": 8, "i16": 16}
YES, NO = "\N{CHECK MARK}", "\N{BALLOT X}"


def bits(key):
    """Of a value that is quantized, else None."""
    value, *scales = key.split(", ")
    return BITS[value] if scales else None


# Headings, and which bits of weights and activations stand below each.
TASKS = (
    ("Not quantized", lambda weights, activations: weights is None),
    ("Weights alone quantized", lambda weights, activations: activations is None),
    ("8-bit weights, 8-bit activations (W8A8)", lambda weights, activations: weights == 8),
    ("4-bit weights, 8- and 16-bit activations", lambda weights, activations: activations > 4),
    ("4-bit weights, 4-bit activations", lambda weights, activations: activations == 4),
)


def icon(cell):
    """Of an answer: yes, yes without some variants, one way of combining alone, or a refusal."""
    if cell.startswith("yes"):
        return f"{YES}{cell[len('yes'):]}"
    return f"{YES} {cell}" if cell == "per_rank" else f"{NO} {cell}"


def cells(line):
    return [cell.strip() for cell in line.strip("|\n ").split("|")]


def table(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- " * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def by_task(header, rows):
    text = ""
    left = rows
    for heading, belongs in TASKS:
        here = [row for row in left if belongs(bits(row[1]), bits(row[2]))]
        left = [row for row in left if row not in here]
        shown = [header] + [[f"`{name}`", *keys, *map(icon, answers)] for name, *keys, answers in
                            ([*row[:3], row[3:]] for row in here)]
        if all(row[2] == "-" for row in here):
            shown = [row[:2] + row[3:] for row in shown]
        text += f"## {heading}\n\n{table(shown)}\n"
    assert not left, left
    return text.rstrip("\n") + "\n"


def page(text):
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = map(cells, block.splitlines())
        if header[0] == "scheme":
            text = text.replace(block, by_task(header, rows))
        elif header[0] == "deployment":
            shown = [header] + [[name, *map(icon, answers)] for name, *answers in rows]
            text = text.replace(block, table(shown))
    text = text.replace("\nBeyond the scheme", "\n## Limits\n\nBeyond the scheme")
    text = text.replace("* else the code", f"* {NO} and the code")
    return re.sub(r"`yes( -i)?`", rf"{YES}\1", text)


sys.stdout.write(page(sys.stdin.read()))
