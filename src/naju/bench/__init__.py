"""Measurements as ratios: every contender is timed in turn within one run, and every result is a row in a file."""
