"""The audit of stored blocks; see docs/how-to/audit.md."""
