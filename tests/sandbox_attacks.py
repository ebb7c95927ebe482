"""Programs that try to get out of the Python sandbox, to stop it, or to leave something in it.

A program prints BREACH where it succeeded; the test also looks at the world outside. `{names}` are filled in by the
test: `{token}` is in the secrets, and in the names of the files that the attacks try to make.
"""

import platform
from dataclasses import KW_ONLY, dataclass

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
CALLS = """
clone 56 220 (17, 0, 0, 0, 0); clone 56 220 (0x10F00, 0, 0, 0, 0); clone3 435 435 (bytes(88), 88); fork 57 - (0,);
vfork 58 - (0,); unshare 272 97 (0x10000000,); mount 165 40 (b'none', b'/tmp', b'tmpfs', 0, 0); bpf 321 280 (0, 0, 72);
io_uring_setup 425 425 (1, bytes(120)); keyctl 250 219 (0, -3, 0); perf_event_open 298 241 (bytes(112), 0, -1, -1, 0);
userfaultfd 323 282 (0,); memfd_create 319 279 (b'x', 0); shmget 29 194 (0, 4096, 0o1666); mq_unlink 241 181 (b'x',);
open_by_handle_at 304 265 (-100, bytes(128), 0); inotify_init1 294 26 (0,); inotify_add_watch 254 27 (0, b'/tmp', 9);
getxattrat 464 464 (-100, {secret!r}.encode(), 0, b'user.x', 0, 16); statmount 457 457 (bytes(32), bytes(800), 800, 0);
listxattrat 465 465 (-100, {secret!r}.encode(), 0, 0, 0); listmount 458 458 (bytes(32), bytes(800), 100, 0);
file_getattr 468 468 (-100, {secret!r}.encode(), bytes(64), 64, 0); kill 62 129 (os.getppid(), 9);
tgkill 234 131 (os.getppid(), os.getppid(), 9); rt_sigqueueinfo 129 138 (os.getppid(), 9, bytes(128));
ptrace 101 117 (16, os.getppid(), 0, 0); process_vm_readv 310 270 (os.getppid(), 0, 0, 0, 0, 0); prctl 157 167 (1, 0);
process_vm_writev 311 271 (os.getppid(), 0, 0, 0, 0, 0); pidfd_getfd 438 438 (3, 4, 0)
"""
"""Name, numbers on x86_64 and aarch64, arguments."""
BY_NUMBER = [row.split(maxsplit=3) for row in CALLS.split(";") if row.split()[COLUMN] != "-"]
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


def attempt(expression: str) -> Attack:
    """An expression that must raise an OSError."""
    return attempts(f"attempt(lambda: {expression})\n")


def attempts(code: str) -> Attack:
    """Code in which each `attempt` must raise an OSError."""
    return Attack(PRELUDE + code, output="refused")


FILES = {
    "read the project": attempt("open({project!r}).read()"),
    "list the project": attempt("os.listdir(os.path.dirname({project!r}))"),
    "read the home folder": attempt("open({home_secret!r}).read()"),
    "list the home folder": attempt("os.listdir({home!r})"),
    "read the password file": attempt("open('/etc/passwd').read()"),
    "list the root": attempt("os.listdir('/')"),
    "read by an open directory": attempt("os.open('..', os.O_DIRECTORY)"),
    "read a secret with O_PATH": attempt("os.read(os.open({secret!r}, os.O_PATH), 100)"),
    "write into the project": attempt("open(os.path.dirname({project!r}) + '/{token}', 'w')"),
    "write into the home folder": attempt("open({home!r} + '/{token}', 'w')"),
    "write a temporary file": attempt("open('/tmp/{token}', 'w')"),
    "make a temporary folder": attempt("__import__('tempfile').mkdtemp('{token}')"),
    "write shared memory": attempt("open('/dev/shm/{token}', 'w')"),
    "write where it stands": attempt("open('{token}', 'w')"),
    "append to a secret": attempt("open({secret!r}, 'a').write('x')"),
    "truncate a secret": attempt("os.truncate({secret!r}, 0)"),
    "delete a secret": attempt("os.unlink({secret!r})"),
    "rename a secret": attempt("os.rename({secret!r}, {secret!r} + '{token}')"),
    "make a secret readable": attempt("os.chmod({secret!r}, 0o777)"),
    "touch a secret": attempt("os.utime({secret!r}, (0, 0))"),
    "give a secret away": attempt("os.chown({secret!r}, os.getuid(), os.getgid())"),
    "label a secret": attempt("os.setxattr({secret!r}, 'user.x', b'x')"),
    "symbolic link to a secret": attempt("os.symlink({secret!r}, '/tmp/{token}')"),
    "hard link to a secret": attempt("os.link({secret!r}, '/tmp/{token}')"),
    "make a named pipe": attempt("os.mkfifo('/tmp/{token}')"),
    "make a device": attempt("os.mknod('/tmp/{token}', 0o20600, os.makedev(1, 1))"),
    "change the interpreter": attempt("open(os.__file__, 'a')"),
    "change the worker's program": attempt("open({worker_file!r}, 'a')"),
    "fill the disk": attempts(
        "for folder in ('/tmp', '/var/tmp', '/dev/shm', '.', {home!r}):\n"
        "    attempt(lambda: open(folder + '/{token}', 'wb').write(bytes(10**8)))\n"
    ),
    "load a library of one's own": attempt("ctypes.CDLL('/tmp/{token}.so')"),
}

PROCESS_FILES = {
    "read its own environment file": attempt("open('/proc/self/environ').read()"),
    "read the trainer's environment": attempt("open('/proc/{trainer}/environ').read()"),
    "read the trainer's memory": attempt("open('/proc/{trainer}/mem', 'rb')"),
    "write the worker's memory": attempt("open(f'/proc/{{os.getppid()}}/mem', 'r+b')"),
    "list the worker's files": attempt("os.listdir(f'/proc/{{os.getppid()}}/fd')"),
    "write to the worker's pipes": attempts(
        "for pid in (os.getppid(), {trainer}, {host}):\n    for number in range(50):\n"
        "        attempt(lambda: open(f'/proc/{{pid}}/fd/{{number}}', 'wb', buffering=0).write(b'forged'))\n"
        "        attempt(lambda: open(f'/proc/{{pid}}/fd/{{number}}', 'rb', buffering=0))\n"
    ),
    "read through its own root": attempt("open('/proc/self/root' + {secret!r}).read()"),
    "see which files the trainer has": attempts(
        "for pid in (os.getppid(), {trainer}, {host}):\n    for name in ('exe', 'cwd', 'fd/0', 'fd/4'):\n"
        "        attempt(lambda: os.readlink(f'/proc/{{pid}}/{{name}}'))\n"
    ),
    "environment variables": Attack("import os\nprint(dict(os.environ))", output="PYTHONHASHSEED"),
}

NETWORK = {
    "TCP to localhost": attempt("__import__('socket').create_connection(('127.0.0.1', {port}), 1)"),
    "TCP to the world": attempt("__import__('socket').create_connection(('198.51.100.1', 80), 1)"),
    "UDP to localhost": attempt("__import__('socket').socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))"),
    "names of hosts": attempt("__import__('socket').getaddrinfo('example.com', 80)"),
    "listen": attempt("__import__('socket').create_server(('127.0.0.1', 0))"),
    "Unix socket": attempt("__import__('socket').socket(1).connect({unix_socket!r})"),
    "abstract Unix socket": attempt("__import__('socket').socket(1).connect('\\0{token}')"),
    "netlink": attempt("__import__('socket').socket(16, 3, 0)"),
    "raw socket": attempt("__import__('socket').socket(2, 3, 1)"),
    "datagram pair": attempt("__import__('socket').socketpair(1, 2)[0].sendto(b'x', {unix_datagrams!r})"),
    "reconnect a pair": attempt("__import__('socket').socketpair()[0].connect({unix_socket!r})"),
    "pair to an abstract socket": attempt("__import__('socket').socketpair()[0].connect('\\0{token}')"),
    "send a pair's data elsewhere": attempt("__import__('socket').socketpair()[0].sendto(b'x', {unix_datagrams!r})"),
}

PROCESSES = {
    "fork": attempt("os.fork()"),
    "fork bomb": attempts("for _ in range(1000):\n    attempt(os.fork)\n"),
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
    "start a program": attempt("__import__('subprocess').run(['/bin/sh', '-c', 'echo BREACH'])"),
    "os.system": Attack("import os\nos.system('echo BREACH') != 0", output="True"),
    "become another program": attempt("os.execv('/bin/sh', ['sh', '-c', 'echo BREACH'])"),
    "multiprocessing": attempt("__import__('multiprocessing').Process(target=print).start()"),
    "thread bomb": Attack(
        "import threading\nfor _ in range(1000):\n    threading.Thread(target=print, args=('BREACH',)).start()",
        "error",
        "can't start new thread",
    ),
    "leave the session": attempt("os.setsid()"),
    "leave the process group": attempt("os.setpgid(0, 0)"),
    "watch a folder by its file descriptor": attempt("__import__('fcntl').fcntl(os.open(os.__file__, 0), 1026, 0xfff)"),
    "labels of a secret": attempt("os.getxattr({secret!r}, 'user.x')"),
    "names of labels of a secret": attempt("os.listxattr({secret!r})"),
    "which processes exist": attempt("os.getpgid({trainer})"),
    "where processes may run": attempt("os.sched_getaffinity({trainer})"),
    "lock a library's file": attempt("__import__('fcntl').flock(os.open(os.__file__, 0), 2)"),
}
if platform.machine() == "x86_64":
    PROCESSES |= {
        "second table of numbers": Attack(PRELUDE + "system_call(0x40000000 + 57)", "killed|ok"),
    }

OTHERS = "for pid in (os.getppid(), {trainer}, {host}, 1, -1, 0, -os.getppid()):\n"
SIGNALS = {
    "kill": attempts(OTHERS + "    attempt(lambda: os.kill(pid, 9))\n"),
    "stop": attempts(OTHERS + "    attempt(lambda: os.kill(pid, signal.SIGSTOP))\n"),
    "kill through a file descriptor": attempt("signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)"),
    "signal by the owner of a pipe": attempts(
        "import fcntl\nr, w = os.pipe()\nattempt(lambda: fcntl.fcntl(r, fcntl.F_SETSIG, 9))\n"
        "attempt(lambda: fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid()))\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\n"
    ),
    "signal by the owner of a socket": attempts(
        "import fcntl, socket, struct\npair = socket.socketpair()\n"
        "attempt(lambda: fcntl.ioctl(pair[0], 0x8901, struct.pack('i', os.getppid())))\n"
    ),
    "limit the worker": attempts(
        "import resource\nattempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)))\n"
    ),
    "slow the worker down": attempt("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)"),
    "move the worker": attempt("os.sched_setaffinity(os.getppid(), {{0}})"),
}

LIMITS = {
    "endless loop": Attack("while True:\n    pass", "timeout"),
    "endless loop in C": Attack("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "timeout"),
    "ignored signals": Attack(
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "timeout",
    ),
    "blocked signals": Attack(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", "timeout"
    ),
    "sleep": Attack("import time\ntime.sleep(1000)", "timeout"),
    "sleep without signals": Attack(
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(1000)",
        "timeout",
    ),
    "raise the limits": Attack(
        "import resource\nfor kind in range(16):\n    for value in ((-1, -1), (10**12, 10**12)):\n"
        "        try: resource.setrlimit(kind, value)\n        except (OSError, ValueError): pass\n"
        "print([resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)])\n"
        "while True: pass",
        "timeout",
        "[1, 0]",
    ),
    "memory in one piece": Attack("x = bytearray(10**10)", "memory", "MemoryError"),
    "memory in pieces": Attack("x = []\nwhile True:\n    x.append(bytes(10**6))", "memory"),
    "memory of numpy": Attack("import numpy\nx = numpy.ones((1 << 16, 1 << 16))", "memory"),
    "shared memory": Attack("import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(100)]", "error"),
    "a large number": Attack("x = 1 << (1 << 40)", "memory"),
    "file descriptors": Attack("import os\nx = [os.pipe() for _ in range(1000)]", "error", "Too many open files"),
    "endless output": Attack("while True:\n    print('x' * 1000)", "killed", is_truncated=True),
    "endless errors": Attack("import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", "killed", is_truncated=True),
    "one large output": Attack("print('x' * 10**8)", "killed", is_truncated=True),
    "a large value": Attack("'x' * 10**7", "killed", is_truncated=True),
    "raw output": Attack("import os\nwhile True:\n    os.write(1, b'x' * 65536)", "killed", is_truncated=True),
    "output after closing Python's": Attack(
        "import os, sys\nos.dup2(1, 9)\nsys.stdout.close()\nwhile True:\n    os.write(9, b'x' * 65536)",
        "killed",
        is_truncated=True,
    ),
    "an endless traceback": Attack(
        "class Loud(Exception):\n    def __str__(self): return 'x' * 10**7\nraise Loud", "killed", is_truncated=True
    ),
    "a timer": Attack("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\nsignal.pause()", "killed"),
    "an endless repr": Attack("class Slow:\n    def __repr__(self):\n        while True: pass\nSlow()", "timeout"),
    "an endless __str__ of an error": Attack(
        "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow", "timeout"
    ),
    "an endless flush at exit": Attack(
        "import sys\nclass Slow:\n    def flush(self):\n        while True: pass\nsys.stdout = Slow()", "timeout"
    ),
}

CRASHES = {
    "segmentation fault": Attack("import ctypes\nctypes.string_at(1)", "killed"),
    "abort": Attack("import os\nos.abort()", "killed"),
    "deep recursion": Attack(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return sorted([x], key=f)\nf(1)",
        "killed|error",  # from Python 3.12 on a RecursionError: its limit for C calls cannot be raised
    ),
    "recursion": Attack("def f(): return f()\nf()", "error", "RecursionError"),
    "deep brackets": Attack("x = (\n" + "(" * 1_000 + ")" * 1_001, "error", "SyntaxError"),
    "a deep tree": Attack("x = " + "-" * 100_000 + "1", "memory"),
    "a long sum": Attack("x = " + "+".join(["1"] * 20_000), "error", "RecursionError"),
    "too much source": Attack("x = 1\n" * 1_000_000, "error", "SyntaxError"),
    "a NUL in the source": Attack("print('a\0b')", "error", "null bytes"),
    "a surrogate in the source": Attack("print('\udcff')", "error", "UnicodeEncodeError"),
    "warnings as errors": Attack(
        "import warnings\nwarnings.simplefilter('error')\nwarnings.warn('BAD')", "error", "BAD"
    ),
    "invalid bytes in the output": Attack("import os\nos.write(1, b'\\xff\\x00\\xfe')", output="\ufffd\0\ufffd"),
    "surrogates in the output": Attack("print('\\udcff', '\\0')", output="\\udcff \0"),
    "no file descriptors": Attack("import os\nos.closerange(0, 100)\nprint('x')", "error"),
    "no file descriptors, and no end": Attack("import os, time\nos.closerange(0, 100)\ntime.sleep(1000)", "timeout"),
    "read standard input": Attack("import sys\nprint(repr(sys.stdin.read()))", output="''"),
    "free an object twice": Attack(
        "import ctypes\nx = object()\nfor _ in range(100): ctypes.pythonapi.Py_DecRef(ctypes.py_object(x))\n"
        "import gc\ngc.collect()\nctypes.string_at(1)",
        "killed",
    ),
    "collect the whole heap": Attack(
        "import gc, sys\nsys.modules.clear()\nfor x in gc.get_objects():\n    if isinstance(x, dict): x.clear()",
        "error|killed|ok",
    ),
    "sys.exit": Attack("import sys\nsys.exit(0)"),
    "sys.exit with a text": Attack("import sys\nsys.exit('text')", "error", "text"),
    "os._exit": Attack("import os\nos._exit(9)", "error"),
    "KeyboardInterrupt": Attack("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
    "a base exception": Attack("class E(BaseException): pass\nraise E('x')", "error", "E: x"),
}

FORGERIES = {
    "write results to all file descriptors": Attack(
        "import json, os\nforged = json.dumps(dict(status='ok', stdout='forged', stderr='', exit_code=0,"
        " seconds=0.0, is_truncated=False)) + '\\n'\nfor number in range(3, 1000):\n"
        "    try: os.write(number, forged.encode())\n    except OSError: pass\n1/0",
        "error",
        "ZeroDivisionError",
    ),
    "print a result": Attack('print(\'{{"status": "timeout", "stdout": "forged"}}\')', output="forged"),
    "use the worker's own objects": Attack(
        "import gc, os\nfor x in gc.get_objects() + [o for m in list(__import__('sys').modules.values())"
        " for o in vars(m).values()]:\n    if hasattr(x, 'fileno') and not isinstance(x, type):\n"
        "        try: number = x.fileno()\n        except (OSError, ValueError, TypeError, AttributeError): continue\n"
        "        if number > 2:\n            try: print('BREACH', os.fstat(number))\n            except OSError: pass\n"
        "1/0",
        "error",
    ),
    "answer in the worker's name": Attack(
        "import sys\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
        "names = [name for name in frame.f_globals]\n1/0",
        "error",
    ),
    "return into the worker's loop": Attack(
        "import sys\nmain = sys._getframe(1).f_globals['Calls']\n"
        "sys._getframe(1).f_globals['finish'] = lambda *a: True\n1/0",
        "error",
    ),
    "exit code of memory": Attack("raise MemoryError", "memory"),
    "patch the interpreter": Attack(
        "import builtins, json, os, random, sys, numpy, sympy\n"
        "builtins.print = lambda *a: None\njson.dumps = json.loads = os.write = None\nrandom.random = lambda: 4\n"
        "numpy.sum = sympy.factor = None\nsys.modules.clear()\nbuiltins.repr = lambda x: 'forged'\n"
    ),
    "stay in the worker's loop": Attack("import os\nos._exit = lambda code: None\nprint('forged')", "error", "forged"),
    "handlers at exit": Attack(
        "import atexit, sys, threading\natexit.register(lambda: print('BREACH'))\nsys.excepthook = print\n"
        "threading.excepthook = print\n1/0",
        "error",
    ),
    "threads that stay": Attack(
        "import _thread\n_thread.start_new_thread(print, ('BREACH',))", "error", "RuntimeError"
    ),
}

ATTACKS: dict[str, Attack] = FILES | PROCESS_FILES | NETWORK | PROCESSES | SIGNALS | LIMITS | CRASHES | FORGERIES

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
