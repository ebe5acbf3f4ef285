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

Why GCS has no path of our own, as s3 has: its XML API takes s3's requests, with a bearer token in place of the
signature and `x-goog-if-generation-match: 0` in place of `if-none-match`. Measured so beside obstore, in one run
against nginx, 1 MiB and 64 KiB (29 November 2026, medians of 9 rounds, on a busy machine): stores at 1.23 and 0.98 of
obstore's rate for 0.93 and 1.01 of its processor time; loads at 1.61 and 1.08 of its rate for 0.56 of its time. Only
loads gain. It would need the tokens of five identities with their renewal (metadata server, service account's key,
gcloud's file, workload identity, a variable), and listings, deletes and copies without boto3, which sends no bearer
token. That is a second client, for one of the two clouds.

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
