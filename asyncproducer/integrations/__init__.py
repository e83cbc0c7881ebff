"""Helpers for other frameworks, one module each. A module imports the framework it is for."""
