"""The pool: ``KVCacheManager`` and the parts that it is composed of. Each part checks its arguments, decides by way of
``Core``, and answers."""
