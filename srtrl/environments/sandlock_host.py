"""The program that starts one sandboxed interpreter with sandlock and answers its intercepted system calls.

A process of its own, so that neither sandlock's threads nor its fork are in the training process. If it ends, the
kernel ends the interpreter, and then the call that runs there.

Usage: sandlock_host.py JSON_LIST_OF_READABLE_PATHS COMMAND [ARGUMENT...]
"""

import json
import sys

from sandlock import Sandbox

if __name__ == "__main__":
    sandbox = Sandbox(fs_readable=json.loads(sys.argv[1]), fs_writable=["/dev/null"], no_coredump=True)
    sandbox.popen(sys.argv[2:]).wait()
