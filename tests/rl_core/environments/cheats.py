"""Wrong solutions of `f(x) = 2x` that fool a grader which trusts their process."""

CHEATS = {
    "equal to everything": """
class E:
  def __eq__(s, o): return True
  def __ne__(s, o): return False
def f(x): return E()
""",
    "int subclass": """
class I(int):
  def __eq__(s, o): return True
  __hash__ = int.__hash__
def f(x): return I(0)
""",
    "early exit": """
import os
def f(x): os._exit(0)
""",
    "system exit": "def f(x): raise SystemExit(0)",
    "spoofed output": """
import os
os.write(1, b'[{"id": "1", "value": 4}]')
os.write(2, b"PASS")
def f(x): return 0
""",
    "bool for int": "def f(x): return x * 2 if x else False",
    "float for int": "def f(x): return x * 2.0",
    "not a number": "def f(x): return float('nan')",
    "patched json": """
import json
json.dumps = lambda *a, **k: '[]'
def f(x): return 0
""",
    "frame walking": """
import sys
def f(x):
  case = sys._getframe(1).f_locals['case']
  return case.get('result', case.get('value'))
""",
    "reading the tests": """
import os
def f(x): return open('/work/in/tests.py').read()
""",
    "editing the answers": """
import sys
def f(x):
  g = sys._getframe(1).f_globals
  g['answers'] = [{'id': c['id'], 'passed': True} for c in g['job']['cases']]
""",
    "every id twice": """
import sys
def f(x):
  g = sys._getframe(1).f_globals
  g['answers'].append({'id': g['case']['id'], 'value': 4})
  return 4
""",
    "special-cased visible": "def f(x): return 4",
    "killing the parent": """
import os
os.kill(os.getppid(), 9)
def f(x): return 0
""",
    "huge answer": "def f(x): return 'x' * 10**6",
    "deep answer": """
def f(x):
  a = []
  for _ in range(10**4): a = [a]
  return a
""",
}
