"""What mpiexec starts in a rank's place: it passes on its environment, and ends as the rank ends.

The rank itself is forked from a process that has imported torch. It gets this process's standard
streams; signals that mpiexec sends to this process go on to it. Started as
``python -I -S shim.py ADDRESS``, with nothing imported that takes time.
"""

import _socket
import os
import signal
import sys


def main() -> None:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(sys.argv[1])
    text = "\0".join(f"{name}={value}" for name, value in os.environ.items()).encode()
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    head = len(text).to_bytes(4, "big")
    connection.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    connection.sendall(text)
    pid = int.from_bytes(connection.recv(4), "big")
    if not pid:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    ended = connection.recv(4)  # a signal's handler does not end it
    if not ended:
        os._exit(1)
    code = int.from_bytes(ended, "big", signed=True)
    if code >= 0:
        os._exit(code)
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
    os._exit(1)


if __name__ == "__main__":
    main()
