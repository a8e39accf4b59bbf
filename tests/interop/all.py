"""make interop: every comparison, one after the other. Fails if one of them does."""

import pathlib
import subprocess
import sys

SCRIPTS = ["interop.py", "gguf_files.py", "published_forms.py", "tools.py", "own_files.py"]


def main():
    here = pathlib.Path(__file__).parent
    failed = []
    for script in SCRIPTS:
        print(f"\n{script}\n", flush=True)
        command = [sys.executable, str(here / script), *sys.argv[1:]]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        if done.returncode:  # the tools tell much on stderr
            failed.append(script)
            print(done.stderr[-2000:])
    print(f"\nmake interop: {'failed: ' + ', '.join(failed) if failed else 'all as it should be'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
