"""The program that starts one sandboxed interpreter with sandlock and answers its intercepted system calls.

A process of its own, so that neither sandlock's threads nor its fork are in the training process. If it ends, the
kernel ends the interpreter, and then the call that runs there.
"""

import json
import sys

from sandlock import Sandbox


def main() -> None:
    """Run the command of the settings in the first argument, with this process's pipes."""
    settings = json.loads(sys.argv[1])
    sandbox = Sandbox(
        fs_readable=settings["readable"],
        fs_writable=["/dev/null"],
        no_coredump=True,
    )
    result = sandbox.popen(settings["command"]).wait()
    sys.exit(0 if result.success else 1)


if __name__ == "__main__":
    main()
