"""Experiments: what is trained, measured, drawn and reported."""
