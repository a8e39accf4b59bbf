#!/usr/bin/env bash
# Who may include whom (docs/architecture.md): every #include "folder/..." goes along its own floor
# or down, never up; a public header counts as the floor that defines what it declares. Prints each
# one that does not, and fails. And no two files may include each other, by way of others or not.
set -euo pipefail
cd "$(dirname "$0")/.."

find src include cli bench python tests/unit tests/capi -name '*.h' -o -name '*.cpp' -o -name '*.cu*' |
  xargs grep -nE '^#include "' |
  awk '
    function allow(folder, others) { allowed[folder] = " " folder " " others " " }
    function within(folder, others) { inner[folder] = " " folder " " others " " }
    function floor(name, headers,   list, i) {
      for (i = split(headers, list, " "); i > 0; --i) floor_of[list[i] ".h"] = name
    }
    BEGIN {
      FS = "[:\"]"
      allow("core"); allow("quant", "core"); allow("moe", "quant core"); allow("files", "core")
      below = "moe quant core"
      allow("checkpoint", "files layer " below)  # layer.h declares the weights of a layer
      allow("host", below); allow("cuda", below); allow("comm", below)
      allow("reference", "host " below); allow("cpu", "host " below)
      below = "reference cpu host cuda comm " below
      allow("layer", "files " below)  # a saved plan is JSON
      below = "layer checkpoint files " below
      allow("tools", below)
      allow("cli", "fusedmoe testing tools " below); allow("bench", "fusedmoe testing tools " below)
      allow("run", "fusedmoe testing tools " below)
      # The public interface alone, so that the tests of it can use src/testing.
      allow("include", "fusedmoe"); allow("testing", "fusedmoe")
      allow("tests", "fusedmoe testing ..")
      allow("capi", "fusedmoe"); allow("python", "fusedmoe tools"); allow("mpi", "fusedmoe")
      # Within src/cuda; "." are its own files. Only layer knows the architectures, sm*.
      within("device"); within("rows", "device"); within("formats", "device rows")
      within("router", "device rows"); within("nccl", "device"); within("peers", "device rows router")
      within("mlp", "device rows formats"); within("one_token", "device rows formats mlp")
      below = "device rows formats router mlp one_token "
      within("experts", ". " below); within("sm90", "experts " below); within("sm80", "experts " below)
      within(".", "experts nccl sm90 sm80 " below)
      floor("core", "error tensor runtime dlpack export log version")
      floor("quant", "quant"); floor("files", "safetensors"); floor("checkpoint", "checkpoint")
      floor("moe", "balance comm parallel wait_hook weights router experts"); floor("layer", "modular_kernel packed_file selection simulation layer")
    }
    {
      file = $1; header = $4
      delete path; split(file, path, "/")
      folder = path[1] == "src" || path[1] == "cli" && path[3] ? path[2] : path[1]
      if (split(header, parts, "/") < 2 || header ~ /^(gtest|nlohmann|cute|cutlass)\//) next
      target = parts[1]
      if (folder == "cuda" && target == "cuda") {
        from = path[4] ? path[3] : "."; to = parts[3] ? parts[2] : "."
        if (index(inner[from], " " to " ")) next
        print file ":" $2 ": cuda/" from " may not include " header
        bad = 1
        next
      }
      if (target == "fusedmoe" && !index(allowed[folder], "fusedmoe")) target = floor_of[parts[2]]
      if (target != "" && index(allowed[folder], " " target " ")) next
      print file ":" $2 ": " folder " may not include " header
      bad = 1
    }
    END { exit bad }'

# No circles: what a file and its source include does not include them. In src/cuda device code is
# included, so there each file stands for itself.
edges() {
  find src cli python include -name '*.h' -o -name '*.cpp' -o -name '*.cu*' |
    xargs grep -E '^#include "' |
    awk -F '[:"]' '
      function unit(file) {
        if (file !~ /^src\/cuda\//) sub(/\.[a-z]+$/, "", file)
        return file
      }
      {
        folder = $1; sub(/\/[^\/]*$/, "", folder)
        base = $1 ~ /^src\// ? "src/" : $1 ~ /^cli\// ? "cli/" : folder "/"
        from = unit($1); to = unit(($3 ~ /^fusedmoe\// ? "include/" : base) $3)
        if (to != from) print from, to
      }'
}
edges | tsort >/dev/null || { echo "these files include each other" >&2; exit 1; }
