#!/usr/bin/env bash
# Makes the virtual environment of make interop in the given folder, once: 6 GB from the package
# index. python3, or $PYTHON, must be 3.11 or newer.
set -euo pipefail
folder=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wanted=$(cat "$here/requirements.txt" "${BASH_SOURCE[0]}" | sha256sum)
if [[ -f $folder/made-from && $(<"$folder/made-from") == "$wanted" ]]; then
  exit 0
fi
echo "Installing transformers, torch and quantization tools in $folder" >&2
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --requirement "$here/requirements.txt"
# llmcompressor asks for older versions of the packages above, but works with these. GPTQModel is
# built on installing, for which it needs torch.
"$folder/bin/pip" install --quiet --no-deps --no-build-isolation llmcompressor==0.14.0.1 \
  gptqmodel==7.7.0
echo "$wanted" >"$folder/made-from"
