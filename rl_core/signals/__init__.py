"""Implicit signals: what users do, read as what they thought. Pure Python; nothing here knows of the control plane."""
