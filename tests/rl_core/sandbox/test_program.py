"""A Python program that runs in the waiting interpreter ends as in one of its own: the same exit, the same output."""

import re

import pytest

from rl_core.sandbox.protocol import RunLimits

LIMITS = RunLimits(wall_s=20.0)
ENDS = {
    "prints": "print('out'); import sys; print('err', file=sys.stderr)",
    "exit code": "raise SystemExit(3)",
    "exit code past a byte": "import sys; sys.exit(259)",
    "exit without a code": "raise SystemExit",
    "exit with a text": "raise SystemExit('a text')",
    "an error": "def f():\n    1 / 0\nf()",
    "an error while an error is handled": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['x']",
    "an error with a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError from error",
    "a group of errors": "raise ExceptionGroup('g', [ValueError(1), ExceptionGroup('h', [TypeError()])])",
    "a syntax error": "print(1)\nif True print(2)",
    "its own hook": "import sys\nsys.excepthook = lambda k, e, t: print(k.__name__, t.tb_lineno)\n1 / 0",
    "a broken hook": "import sys\nsys.excepthook = lambda k, e, t: 1 / 0\nraise ValueError",
    "what is registered for the end": "import atexit\natexit.register(print, 'first')\natexit.register(print, 2)",
    "an error at the end": "import atexit\natexit.register(lambda: 1 / 0)",
    "a thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "a daemon thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "a finalizer": "class A:\n    def __del__(self): print('gone')\na = A()",
    "a finalizer in a cycle": "class A:\n    def __del__(self): print('gone')\na = A()\na.a = a\ndel a",
    "an unclosed file": "f = open('/work/f', 'w')\nf.write('kept')\n"
    "import atexit, os\nif os.fork() == 0: raise SystemExit\nos.wait()\nprint(open('/work/f').read())",
    "os._exit": "print('lost', end='')\nimport os\nos._exit(4)",
    "a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "a closed stdout": "import sys\nsys.stdout.close()",
    "a stdout that fails": "import os\nprint('x')\nos.close(1)",
    "its names": "print(sorted(globals()), __name__, __builtins__, __loader__)",
    "its modules": "import sys\nprint(sys.modules['__main__'].__dict__ is globals(), 'rl_core' in sys.modules)",
    "its arguments": "import sys\nprint(sys.argv, sys.path, sys.flags.isolated, sys.flags.no_site)",
    "its frames": "import sys\nprint(sys._getframe().f_code.co_name)",
    "pickling": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "an encoding": "# -*- coding: latin-1 -*-\nprint('\u00e9', '\U0001f40d')",
    "hash seeds": "print(hash('x') == hash('x'))",
}


def said(result):
    return (result.outcome, result.exit_code, result.stdout, re.sub(rb"0x\w+", b"0x", result.stderr))


@pytest.mark.parametrize("name", ENDS)
async def test_a_program_ends_as_in_an_interpreter_of_its_own(sandbox, name):
    ours = await sandbox.run(["python3", "-I", "-S", "-c", ENDS[name], "an argument"], limits=LIMITS)
    own = await sandbox.run(["/python/bin/python3", "-I", "-S", "-c", ENDS[name], "an argument"], limits=LIMITS)
    assert said(ours) == said(own)


@pytest.mark.parametrize("name", ["an error", "a syntax error", "its arguments"])
async def test_a_file_runs_as_in_an_interpreter_of_its_own(sandbox, name):
    files = {"p.py": ENDS[name].encode()}
    ours = await sandbox.run(["python3", "-I", "-S", "p.py", "-x"], files=files, limits=LIMITS)
    own = await sandbox.run(["/python/bin/python3", "-I", "-S", "p.py", "-x"], files=files, limits=LIMITS)
    assert said(ours) == said(own)


async def test_no_file_is_said_as_the_interpreter_says_it(sandbox):
    ours = await sandbox.run(["python3", "-I", "-S", "none.py"])
    own = await sandbox.run(["/python/bin/python3", "-I", "-S", "none.py"])
    assert said(ours)[:3] == said(own)[:3]
    assert ours.stderr.split(b": ", 1)[1] == own.stderr.split(b": ", 1)[1]


async def test_what_a_module_left_open_is_written(sandbox):
    code = "import sys\nsys.path.insert(0, '/work')\nimport left"
    files = {"left.py": b"f = open('/work/out/x', 'w')\nf.write('kept')"}
    assert (await sandbox.run(code=code, files=files)).artifacts == {"x": b"kept"}
