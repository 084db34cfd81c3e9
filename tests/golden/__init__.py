"""Golden digests: what pools, host caches, storage managers and queues of stores decide: a hash for each case.

A case drives public calls with a fixed seed, secret and clock. It records outcomes, moves with their tickets, block
tables, events, and the calls that reach a store. Keys are numbered by their first appearance, so that their bytes may
change; the case "keys" alone has these. Recorded is what was decided, not how copies were enqueued, and no time.
``digests.json`` has a line for each case. ``python -m tests.golden`` says which cases are not as there, ``--write``
makes the file anew, and ``--show CASE`` prints what the hash is made of, to compare two checkouts. A commit that
rewrites the file says which decision has changed, and why.
"""
