"""The audit: stored blocks are compared with blocks that the engine computes anew; see docs/how-to/audit.md.

A stack whose file has `audit` opens `manager.AuditedManager`, a subclass of the tiering manager. The scheduler's thread
calls it. What must stay true: the lookups of an audited request are misses, so that it uses no stored block. Second
copies lie in spare rows, which no lookup finds.

manager     lets the audit see some of the engine's calls
audit       which requests are audited, and where their blocks are compared
comparison  spare rows, and how far two copies differ
"""
