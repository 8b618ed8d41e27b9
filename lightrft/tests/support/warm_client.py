"""The command of :mod:`lightrft.tests.support.warm`: it has its program started, passes signals on, ends as it does."""
import json
import os
import signal
import socket
import sys

PASSED_ON = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


def main() -> None:
    """Words: the socket of the server, the interpreter, and what follows ``python``."""
    path, python, *words = sys.argv[1:]
    if words[:1] == ["-c"]:  # such as a reward worker, whose open files would not be passed on
        os.execv(python, [python, *words])
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except OSError:  # the tests are over
        os.execv(python, [python, *words])
    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    asked = json.dumps({"words": words, "environ": dict(os.environ), "folder": os.getcwd(), "ignored": ignored})
    message = asked.encode()
    head = len(message).to_bytes(8, "big")
    socket.send_fds(server, [head], [0, 1, 2])
    server.sendall(message)
    said = server.makefile()
    pid = int(said.readline())
    for number in PASSED_ON:
        if number not in ignored:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(said.readline() or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
