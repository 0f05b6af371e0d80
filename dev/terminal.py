#!/usr/bin/env python3
"""Runs a command in a terminal of so many columns and prints what that is sent: how a screen would look.
    dev/terminal.py COLUMNS COMMAND [WORD]...
The command's exit status is this one's."""
import fcntl
import os
import pty
import struct
import sys
import termios


def main():
    columns, command = int(sys.argv[1]), sys.argv[2:]
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.execvp(command[0], command)
    sent = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the command has closed it
            break
        if not piece:
            break
        sent += piece
    sys.stdout.buffer.write(sent.replace(b"\r\n", b"\n"))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


sys.exit(main())
