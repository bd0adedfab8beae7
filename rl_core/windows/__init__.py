"""A window of production answers as training data: which are taken, what each is worth, how much it counts.

Pure Python: the conductor and the pages use it. Imports no torch and no numpy.
"""
