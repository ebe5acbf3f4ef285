"""The tiers gcs and azure: blocks as objects in a bucket of Google Cloud Storage, or a container of Azure Blob Storage.

The stack finds them by the hooks of `gcs` and `azure`. What both do is `tiered_kv.toolkit.objects`, as for s3; this
plugin has the requests, which the library obstore makes. The toolkit's workers call it, and the background threads of
the tier.

What must stay true.

- A call ends by its deadline (`client.ObjectClient`): a blocking call of obstore cannot be ended, so it is only made
  while more time is left than its own timeout, and else a coroutine that is cancelled at the deadline.
- obstore reads no row: it copies what is stored when the call begins, and what is loaded is copied into the row by the
  worker that reports it (`store`).
- obstore is opened in the process that uses it: its threads do not survive a fork.
- No message has a key, a token or a signed URL (`answers`).

gcs, azure      the tier types
settings        their YAML entries
identity        which credentials are used, in words
client          the connection: requests with deadlines, and credentials that are read again
loop            coroutines that are cancelled at their deadline, without asyncio's descriptors
answers         obstore's errors as verdicts and sentences
store           requests for blocks
control         listings, deletes and renewals
tier            the tier
administration  survey, verify and purge
"""
