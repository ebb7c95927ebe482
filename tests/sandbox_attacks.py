"""Programs that try to get out of the Python sandbox, to stop it, or to leave something in it.

A program prints BREACH where it succeeded; the test also looks at the world outside. `{names}` are filled in by the
test: `{token}` is in the secrets, and in the names of the files that the attacks try to make. Most of them are in
`sandbox_attacks.yaml`: there are those that must be refused, and those that must end in some way.
"""

import platform
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ruamel.yaml import YAML

from srtrl.environments.python_worker import ALLOWED_CALLS, ALLOWED_VALUES


@dataclass(frozen=True)
class Attack:
    """A program, and how it must end."""

    code: str
    status: str = "ok"
    output: str = ""
    """Text that stdout or stderr must contain."""
    _: KW_ONLY
    is_truncated: bool = False


HARMLESS_IN_BUBBLEWRAP = {"list the project", "list the home folder", "list the root", "read by an open directory"}
"""They succeed there, but find only the empty folders on the way to those that can be read."""


COLUMN = 1 + (platform.machine() == "aarch64")
PROGRAMS = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))
BY_NUMBER = [row.split(maxsplit=3) for row in PROGRAMS["calls"].split(";") if row.split()[COLUMN] != "-"]
OTHER_NUMBERS = set(range(600)) - {
    int(row.split()[COLUMN].replace("-", "-1")) for row in (ALLOWED_CALLS + "," + ALLOWED_VALUES).split(",")
}
OTHER_NUMBERS -= {335, 336}  # on x86_64 no filter sees them: they end a process that is not being probed

PRELUDE = """\
import ctypes, errno, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)

def system_call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    print("BREACH" if result != -1 else errno.errorcode[ctypes.get_errno()])

def attempt(action):
    try:
        print("BREACH", action())
    except OSError as error:
        if not seen: print("refused", type(error).__name__)
        seen.add(type(error))

seen = set()
"""


def attempts(text: str) -> Attack:
    """An expression that must raise an OSError, or code in which each `attempt` must."""
    code = text if "attempt(" in text else f"attempt(lambda: {text})\n"
    return Attack(PRELUDE + code, output="refused")


MADE = {
    "double fork and setsid": Attack(
        PRELUDE + "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: signal.pause()\n",
        "error",
        "OSError",
    ),
    "calls by number": Attack(
        PRELUDE + "".join(f"system_call({row[COLUMN]}, *{row[3]})\n" for row in BY_NUMBER),
        output="ENOSYS\n" * len(BY_NUMBER),
    ),
    "every call that is not allowed": Attack(
        PRELUDE
        + f"for number in {sorted(OTHER_NUMBERS)}:\n"
        + "    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:\n"
        + "        print('BREACH', number)\n"
    ),
    "deep brackets": Attack("x = (\n" + "(" * 1_000 + ")" * 1_001, "error", "SyntaxError"),
    "a deep tree": Attack("x = " + "-" * 100_000 + "1", "memory"),
    "a long sum": Attack("x = " + "+".join(["1"] * 20_000), "error", "RecursionError"),
    "too much source": Attack("x = 1\n" * 1_000_000, "error", "SyntaxError"),
    "a NUL in the source": Attack("print('a\0b')", "error", "null bytes"),
    "a surrogate in the source": Attack("print('\udcff')", "error", "UnicodeEncodeError"),
    "invalid bytes in the output": Attack("import os\nos.write(1, b'\\xff\\x00\\xfe')", output="\ufffd\0\ufffd"),
    "surrogates in the output": Attack("print('\\udcff', '\\0')", output="\\udcff \0"),
}
if platform.machine() == "x86_64":
    MADE["second table of numbers"] = Attack(PRELUDE + "system_call(0x40000000 + 57)", "killed|ok")
REFUSED = {name: attempts(text) for group in PROGRAMS["refused"].values() for name, text in group.items()}
ENDS = {name: Attack(**fields) for group in PROGRAMS["ends"].values() for name, fields in group.items()}
ATTACKS: dict[str, Attack] = REFUSED | MADE | ENDS

REPRESENTATIVES = [
    *("read the home folder", "write a temporary file", "delete a secret", "read by an open directory"),
    *("read the trainer's environment", "write to the worker's pipes", "environment variables"),
    *("TCP to localhost", "abstract Unix socket", "pair to an abstract socket"),
    *("double fork and setsid", "every call that is not allowed", "which processes exist"),
    *("kill", "signal by the owner of a pipe"),
    *("endless loop in C", "sleep", "raise the limits", "memory in pieces", "endless output"),
    *("segmentation fault", "collect the whole heap", "os._exit"),
    *("write results to all file descriptors", "stay in the worker's loop", "handlers at exit"),
]
"""At least one for each barrier; the tests of all others are slow."""
