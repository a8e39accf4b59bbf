"""How programs end: with daemon threads in a forward, and by Ctrl-C in a wait for other ranks."""

import socket
import subprocess
import sys
import textwrap

import pytest

LIMIT = 60  # seconds, for what takes one


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_interpreter_ends_while_daemon_threads_run_forwards():
    code = """
        import threading
        import numpy as np, fusedmoe

        rng = np.random.default_rng(0)
        w13, w2 = (rng.random(s, np.float32) for s in ((4, 64, 64), (4, 64, 32)))
        layer = fusedmoe.MoELayer.from_tensors(
            w13, w2, topk=2, router_weight=rng.random((4, 64), np.float32), dtype="f32", num_threads=1
        )
        x = rng.random((8, 64), np.float32)
        running = threading.Barrier(4)

        def spin():
            layer(x)
            running.wait()
            while True:
                layer(x)

        for _ in range(3):
            threading.Thread(target=spin, daemon=True).start()
        running.wait()
        """
    for process in [start(code) for _ in range(4)]:
        _, err = process.communicate(timeout=LIMIT)
        assert (process.returncode, err) == (0, "")


# Each waits for rank 0 or 1, which never comes; ranks may wait two minutes.
WAITS = {
    "join, rank 0": "Communicator.join(0, 2, '127.0.0.1', port, timeout=120)",
    "join, rank 1": "Communicator.join(1, 2, '127.0.0.1', port, timeout=120)",
    "folder": "Communicator.from_folder(0, 2, folder, timeout=120)",
    "barrier": "Communicator.threads(2, timeout=120)[0].barrier()",
    "together": "Communicator.threads(2, timeout=120)[0].together(lambda: None)",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_for_ranks(wait, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"""
        import os, signal, threading
        from fusedmoe import Communicator
        port, folder = {port}, {str(tmp_path / "ranks")!r}
        calls = 0

        def handler(number, frame):
            # The third time inside the wait: it was handled there, not before or behind it.
            global calls
            calls += frame.f_code.co_filename.endswith("ranks.py")
            if calls == 3:
                raise KeyboardInterrupt

        def interrupt():
            while True:
                os.kill(os.getpid(), signal.SIGINT)
                never.wait(0.05)

        signal.signal(signal.SIGINT, handler)
        never = threading.Event()
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            {WAITS[wait]}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            os._exit(0)
        """
    process = start(code)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (0, "interrupted\n"), err
