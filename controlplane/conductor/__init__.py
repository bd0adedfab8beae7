"""The conductor: looks at the rows and decides what is next. It keeps no state of its own.

advance    one run, under its advisory lock
stages     StageKind → what is decided for such a stage
rl         the decisions of a simulated RL stage
curriculum which tasks a stage draws next
staleness  how many groups may be admitted, and which are too old
placement  which version each replica of a run should hold
fleet      looking at replicas; repairing what differs from its wish
looks      many rows, each looked at by itself
loop       the process: duties, each at its interval, and on every nudge
"""

from controlplane.conductor.advance import run_advance

__all__ = ["run_advance"]
