#!/usr/bin/env python3
"""Prints a header with its plain comments as Doxygen's, so that the headers need no commands of it.

usage: doxygen_filter.py HEADER (INPUT_FILTER of scripts/make-docs.sh), or --pages: the groups, and
the first page.

The first comment describes the file. Everything declared in a header of C++ belongs to that
header's group. In C, a comment below a rule starts a group, and comments belong to what follows
them, or stands before them on their line.
"""

import pathlib
import re
import sys

INCLUDE = pathlib.Path(__file__).parents[1] / "include"
# Groups of C++, and their headers.
GROUPS = {
    "layers": ("Layers and checkpoints", "layer checkpoint weights packed_file safetensors"),
    "experts": ("Experts and their selection", "modular_kernel experts selection"),
    "router": ("Router", "router"),
    "quantization": ("Number formats", "quant"),
    "ranks": ("Ranks", "comm parallel balance simulation wait_hook"),
    "runtime": ("Tensors, devices, errors", "tensor runtime dlpack error log export version"),
}
C = {
    "c": ("C: layers", "fusedmoe fusedmoe_hooks fusedmoe_selection"),
    "c_quant": ("C: number formats", "fusedmoe_quant"),
    "c_ranks": ("C: ranks", "fusedmoe_ranks"),
}
GROUP_OF = {
    name: group for group, (_, names) in {**GROUPS, **C}.items() for name in names.split()
}
RULE = re.compile(r"^/\* -{60,}\n((?: \*.*\n)*? \*.*) \*/\n", re.MULTILINE)


def path_of(name):
    return f"{name}.h" if GROUP_OF[name] in C else f"fusedmoe/{name}.h"


def first_comment(text):
    """Its words, and what follows it."""
    if text.startswith("/*"):
        comment, rest = text[2:].split("*/\n", 1)
        lines = [line.removeprefix(" *") for line in comment.split("\n")]
    else:
        comment = re.match(r"(?://.*\n)+", text).group()
        lines, rest = [line[2:] for line in comment.splitlines()], text[len(comment) :]
    words = "\n".join(line.removeprefix(" ") for line in lines)
    return re.sub(r"\n\n  (\S.*)\n\n", r"\n\n      \1\n\n", words), rest  # an example


def as_cpp(words, rest, group):
    """A group takes what stands beside its marks, but not what is in a namespace between them."""
    start, end = f"/** @addtogroup {group}\n@{{ */\n", "/** @} */\n"
    if not re.search(r"(?m)^namespace", rest):
        return f"/** @file\n{words} */\n{start}{rest}{end}"
    for name in re.findall(r"(?m)^\}  // namespace (\w+)", rest):
        rest = rest.replace(f"\nnamespace {name} {{\n", f"\nnamespace {name} {{\n{start}")
        rest = rest.replace(f"\n}}  // namespace {name}\n", f"\n{end}}}  // namespace {name}\n")
    return f"/** @file\n{words} */\n{rest}"


def as_c(name, words, rest, group):
    """Each section, which begins with a rule, is a group inside that of the header; its name begins with the
    header's, as a group may have several."""
    sections = 0

    def section(found):
        nonlocal sections
        sections += 1
        text = found.group(1).removeprefix(" * ").replace("\n *", "")
        title, details = [*re.split("[.:] ", text, maxsplit=1), ""][:2]
        close = "/** @} */ " if sections > 1 else ""
        return (
            f"{close}/** @defgroup {name}_{sections} {title.rstrip('.')}\n"
            f"{details[:1].upper()}{details[1:]}\n@{{ */\n"
        )

    rest = RULE.sub(section, rest)
    rest = re.sub(r"(?m)^( {8,})/\*(?![*<])", r"\1/**<", rest)  # goes on with the line above
    rest = re.sub(r"(?m)(\S.*[,;{])( +)/\*(?![*<])", r"\1\2/**<", rest)
    rest = re.sub(r"(?m)^( *)/\*(?![*<])", r"\1/**", rest)
    rest = re.sub(r'(extern "C" \{\n#endif\n)', rf"\1/** @addtogroup {group}\n@{{ */\n", rest)
    end = rest.rindex("#ifdef __cplusplus")
    ends = "/** @} */\n" * (2 if sections else 1)
    return f"/** @file\n{words} */\n{rest[:end]}{ends}{rest[end:]}"


def as_doxygen(name, text):
    words, rest = first_comment(text)
    if name not in GROUP_OF:
        sys.exit(f"scripts/doxygen_filter.py: {name}.h is in no group")
    group = GROUP_OF[name]
    return as_c(name, words, rest, group) if group in C else as_cpp(words, rest, group)


def pages():
    lines = ["/** @mainpage C++ and C reference", ""]
    lines += ["C++ begins with fusedmoe::MoeLayer and fusedmoe::fused_experts(), C with fusedmoe.h.", ""]
    for groups in (GROUPS, C):
        for group, (title, names) in groups.items():
            lines += [f'@ref {group} "{title}"', "", "| header | what it is |", "| --- | --- |"]
            for name in names.split():
                words, _ = first_comment((INCLUDE / path_of(name)).read_text())
                lines.append(f"| @ref {path_of(name)} | {brief(words)} |")
            lines.append("")
    lines.append("*/")
    for groups in (GROUPS, C):
        for group, (title, _) in groups.items():
            lines.append(f"/** @defgroup {group} {title} */")
    return "\n".join(lines) + "\n"


def brief(words):
    """The first sentence, on a line."""
    paragraph = " ".join(words.split("\n\n")[0].split())
    return re.match(r".*?[.](?= [A-Z]|$)|.*", paragraph).group()


if __name__ == "__main__":
    argument = sys.argv[1]
    if argument == "--pages":
        sys.stdout.write(pages())
    else:
        header = pathlib.Path(argument)
        sys.stdout.write(as_doxygen(header.stem, header.read_text()))
