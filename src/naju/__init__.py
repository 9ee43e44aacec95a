"""Naju."""
