"""The examples of a page, as they are written, in order, in an empty folder.

usage: readme_test.py PAGE FOLDER PROGRAM CPP_PROGRAM

sh blocks run in bash with PROGRAM's folder on the PATH, Python blocks with this interpreter; for the C++ block
the program runs that the build has made of it. Other blocks (cmake) belong to other tests.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

page, folder, program, cpp_program = (pathlib.Path(argument) for argument in sys.argv[1:])
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
commands = {
    "sh": lambda block: ["bash", "-euo", "pipefail", "-c", block],
    "python": lambda block: [sys.executable, "-c", block],
    "cpp": lambda block: [cpp_program],
}
blocks = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
ran = []
for language, block in blocks:
    if language not in commands:
        continue
    print(f"--- {language}\n{block}", flush=True)
    subprocess.run(commands[language](block), cwd=folder, env=environment, check=True)
    ran.append(language)
shutil.rmtree(folder)
assert {"sh", "python", "cpp"} <= set(ran), ran
