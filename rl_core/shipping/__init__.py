"""How versions reach users: the cadence's spec, its freezes, and the statistics of a canary. Imports no numpy."""
