"""The audit of a run: what was written, and what is in the log. See docs/audit.md."""
