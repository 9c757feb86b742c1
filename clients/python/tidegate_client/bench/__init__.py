"""Measures a served model from outside: loads, clocks, figures. `tidegate bench` is its command line."""
